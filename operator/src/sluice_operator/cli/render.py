"""`sluice render`: the objects that the operator would apply for a manifest."""

from __future__ import annotations

import importlib.metadata
import json
import re

import click
import yaml

from sluice_operator.cluster.kinds import OPTIONAL_KINDS
from sluice_operator.rendering.pod_template import Images, Object
from sluice_operator.rendering.render import objects
from sluice_operator.rendering.surroundings import Surroundings
from sluice_operator.resource import manifest

_VERSION = importlib.metadata.version("sluice-operator")
# What could stand there at all; whether a registry takes it is the registry's to say.
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,1023}")
_URL = re.compile(r"https?://[!-~]{1,1024}")


@click.command()
@click.argument("file", metavar="FILE")
@click.option("--namespace", "-n", default="default", show_default=True, help="Where the manifest names none.")
@click.option(
    "--engine-image",
    envvar="SLUICE_ENGINE_IMAGE",
    default=f"sluice.dev/sluice-engine:{_VERSION}",
    show_default=True,
    help="What the operator was installed with.",
)
@click.option(
    "--gate-image",
    envvar="SLUICE_GATE_IMAGE",
    default=f"sluice.dev/sluice-sidecar:{_VERSION}",
    show_default=True,
    help="What the operator was installed with.",
)
@click.option(
    "--prometheus",
    "prometheus_url",
    envvar="SLUICE_PROMETHEUS_URL",
    default="",
    metavar="URL",
    help="Where KEDA asks for the demand, as the chart's autoscaling.prometheus; left out, no ScaledObject is printed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def render(file: str, namespace: str, engine_image: str, gate_image: str, prometheus_url: str, *, as_json: bool) -> int:
    """Print the objects that the operator would apply.

    FILE holds InferenceServices; "-" is standard input. A PodMonitor is printed as where Prometheus Operator is.

    Exit codes: 0 printed; 2 wrong usage, or a file or rule that is broken.
    """
    if not manifest.is_namespace(namespace):
        problem = f"{namespace!r} is no namespace: lower case letters, digits and '-', at most 63"
        raise click.BadParameter(problem, param_hint="--namespace")
    for option, image in (("--engine-image", engine_image), ("--gate-image", gate_image)):
        if not _IMAGE.fullmatch(image):
            raise click.BadParameter(f"{image!r} is no name of an image", param_hint=option)
    if prometheus_url and not _URL.fullmatch(prometheus_url):
        raise click.BadParameter(f"{prometheus_url!r} is no URL, as http://prometheus:9090", param_hint="--prometheus")
    images = Images(engine=engine_image, gate=gate_image)
    # As where the optional kinds are installed, and the chart is with its defaults.
    surroundings = Surroundings(kinds=frozenset(OPTIONAL_KINDS), prometheus_url=prometheus_url)
    rendered: list[Object] = []
    for spec in manifest.read_specs(file, namespace=namespace):
        if spec.autoscaling and not prometheus_url:
            click.echo(f"{spec.name}: spec.autoscaling: no ScaledObject is printed without --prometheus", err=True)
        rendered += objects(spec, images, surroundings=surroundings)
    if as_json:
        click.echo(json.dumps(rendered, indent=2))
    else:
        click.echo(to_yaml(rendered), nl=False)
    return 0


class _Plain(yaml.SafeDumper):
    """Writes everything out: an anchor would only puzzle a reader."""

    def ignore_aliases(self, data: object) -> bool:
        """Never an alias."""
        del data
        return True


def to_yaml(rendered: list[Object]) -> str:
    """Documents of one YAML stream, keys in the order in which they were written."""
    text: str = yaml.dump_all(rendered, Dumper=_Plain, sort_keys=False, width=120, explicit_start=True)
    return text
