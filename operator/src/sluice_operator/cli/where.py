"""The options that say where: namespace, context and kubeconfig, as kubectl has them; shared by what asks a cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec

import click

from sluice_operator.cli.kubectl import Kubectl

P = ParamSpec("P")


def in_cluster(command: Callable[Concatenate[Kubectl, P], int]) -> Callable[..., int]:
    """Give a command the three options, and hand it a `Kubectl` that goes by them."""

    @click.option("--namespace", "-n", default="", metavar="NAME", help="Left out, that of the context.")
    @click.option("--context", default="", metavar="NAME", help="Left out, the current one of the kubeconfig.")
    @click.option("--kubeconfig", default="", metavar="FILE", help="Left out, kubectl's own.")
    @functools.wraps(command)
    def wrapped(namespace: str, context: str, kubeconfig: str, *args: P.args, **kwargs: P.kwargs) -> int:
        kubectl = Kubectl(namespace=namespace, context=context, kubeconfig=kubeconfig)
        return command(kubectl, *args, **kwargs)

    return wrapped
