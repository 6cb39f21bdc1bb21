"""Prometheus, promtool and Alertmanager: those of the PATH, else unpacked from Debian's packages into the cache.

Unpacked and not installed: an installed package would start a daemon on the machine.
"""

import shutil
from pathlib import Path

from cluster.testnode import cache, command
from cluster.testnode.errors import Missing, NodeError
from cluster.testnode.progress import Progress

PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager")
PACKAGES = ("prometheus", "prometheus-alertmanager")


def ensure(progress: Progress) -> Path:
    """A folder with the three programs, and under `share` what Debian's Alertmanager reads of /usr/share.

    Raises:
        Missing: there is no apt-get here, or its registry cannot be reached.
        Broken: a package cannot be unpacked.
    """

    def make(made: Path) -> None:
        there = {name: shutil.which(name) for name in PROGRAMS}
        if all(there.values()):
            for name, path in there.items():
                (made / name).symlink_to(str(path))
            (made / "share").symlink_to("/usr/share")
            return
        if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
            raise Missing(f"apt-get and dpkg-deb, or these in the PATH: {', '.join(PROGRAMS)}")
        with progress.task("monitoring", f"unpacking {', '.join(PACKAGES)}"):
            _unpack(made)

    return cache.ensure("programs/monitoring", cache.digest([Path(__file__)]), make)


def _unpack(made: Path) -> None:
    debs = made / "debs"
    debs.mkdir()
    words = ["apt-get", "download", "-q", *PACKAGES]
    try:
        command.run("monitoring", words, cwd=debs)
    except NodeError:  # the lists are not there, or name a file that is gone
        command.run("apt-update", ["apt-get", "update", "-q"])
        command.run("monitoring", words, cwd=debs)
    for deb in debs.glob("*.deb"):
        command.run("monitoring", ["dpkg-deb", "-x", deb, made / "tree"])
    for name in PROGRAMS:
        (made / "tree/usr/bin" / name).rename(made / name)
    (made / "share/prometheus").mkdir(parents=True)
    (made / "tree/usr/share/prometheus/alertmanager").rename(made / "share/prometheus/alertmanager")
    shutil.rmtree(debs)
    shutil.rmtree(made / "tree")
