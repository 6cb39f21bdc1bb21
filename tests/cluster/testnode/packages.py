"""The Debian packages that the node needs, installed when their programs are not there."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from cluster.testnode import command
from cluster.testnode.errors import Missing
from cluster.testnode.progress import Progress

# Package: one file or program by which to know that it is there, from whatever source.
NEEDED = {
    "buildah": "buildah",
    "conntrack": "conntrack",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "debootstrap": "debootstrap",
    "iproute2": "ip",
    "iptables": "iptables",
    "openssl": "openssl",
    "runc": "runc",
    "tar": "tar",
    "util-linux": "unshare",
}
BESIDE = {"ipset": "ipset"}
"""What the programs that run beside Sluice need, in the full tier alone."""
SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def lacking(needed: Mapping[str, str] = NEEDED) -> list[str]:
    """The packages that have to be installed first."""
    return [
        package
        for package, sign in needed.items()
        if not (Path(sign).exists() if sign.startswith("/") else shutil.which(sign, path=SYSTEM_PATH))
    ]


def ensure(progress: Progress, needed: Mapping[str, str] = NEEDED) -> None:
    """Installs what is lacking.

    Raises:
        Missing: there is no apt-get here, or its registry cannot be reached.
    """
    wanted = lacking(needed)
    if not wanted:
        return
    if not shutil.which("apt-get"):
        raise Missing(f"apt-get, or these installed by hand: {', '.join(wanted)}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    with progress.task("packages", f"installing {', '.join(wanted)}"):
        command.run("apt-update", ["apt-get", "update", "-q"], env=quiet)
        command.run("apt-install", ["apt-get", "install", "-q", "-y", "--no-install-recommends", *wanted], env=quiet)
