"""A model on a claim: mounted, told when it is not there, served when it is."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from cluster.service.space import Space, models
from cluster.service.streams import once
from sluice_engine.config import ModelSource
from sluice_engine.sources import resolve

pytestmark = pytest.mark.cluster


async def test_a_gguf_file_on_a_claim_is_served_once_its_path_is_right(space: Space) -> None:
    folder = models(space.node) / space.name
    folder.mkdir()
    shutil.copy(resolve(ModelSource(demo="smollm2-135m")), folder / "smollm2.gguf")
    folder.chmod(0o755)
    (folder / "smollm2.gguf").chmod(0o644)

    def service(path: str) -> Any:
        source = {"persistentVolumeClaim": {"claimName": "models", "path": f"{space.name}/{path}"}}
        return space.tiny(
            "claimed", model={"servedName": "smol", "source": source}, cache={"capacity": "64Mi"},
            slo={"timeToFirstToken": "60s", "interTokenLatency": "2s", "enforcement": "Observe"},
        )  # fmt: skip

    space.apply(service("smol.gguf"))
    space.wait("claimed", "jsonpath={.status.failure.reason}=ModelMissing")
    said = space.status("claimed")["failure"]["message"]
    assert "(PersistentVolumeClaim models)" in said
    assert "holds smollm2.gguf" in said

    url = space.serve(service("smollm2.gguf"))

    assert (await once(url, "smol", "Say hello.", max_tokens=4)).finish_reason
    (pod,) = [one for one in space.pods("claimed") if "deletionTimestamp" not in one["metadata"]]
    (mount,) = [one for one in pod["spec"]["containers"][0]["volumeMounts"] if one["name"] == "sluice-model"]
    assert mount["readOnly"] is True
