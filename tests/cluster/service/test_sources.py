"""A model on a claim, and one of a hub: told when it cannot be had, served when it can."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from cluster.service.space import Space, models
from cluster.service.streams import once
from cluster.testnode.boot import NODE_IP
from hub_server import COMMIT, REPOSITORY, HubServer
from sluice_engine.config import ModelSource
from sluice_engine.model_files.sources import resolve

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


@pytest.mark.full
async def test_a_hubs_model_is_downloaded_with_the_token_of_a_secret_and_kept_on_a_volume(space: Space) -> None:
    cache = space.node.run / f"{space.name}-cache"
    cache.mkdir()
    cache.chmod(0o777)  # pods run as somebody else
    kept = space.node.mount(space.name, "hub-cache", cache, "/unused", read_only=False)
    token = "hf_of_this_test"
    space.node.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hf"}, "stringData": {"token": token}},
        namespace=space.name,
    )
    source = {"repository": REPOSITORY, "tokenSecretRef": {"name": "hf", "key": "token"}, "cacheVolume": "hub-cache"}
    service = space.tiny("pulled", model={"servedName": "tiny", "source": {"huggingFace": source}})
    template = service["spec"]["podTemplate"]
    template["volumes"].append(kept.volume)
    with HubServer(models(space.node) / "tiny", host=NODE_IP, token="hf_another") as hub:
        template["engine"]["env"].append({"name": "HF_ENDPOINT", "value": hub.url})
        space.apply(service)
        space.wait("pulled", "jsonpath={.status.failure.reason}=ModelAccessDenied")
        assert "does not let this token read acme/tiny (status 401)" in space.status("pulled")["failure"]["message"]

        hub.token = token  # the next start of the container asks again
        url = space.serve(service)

        assert (await once(url, "tiny", "Say hello.", max_tokens=4)).finish_reason
    assert (cache / "models--acme--tiny/snapshots" / COMMIT / "model.safetensors").is_file()
    assert space.tells_nobody("pulled", token)
    (pod,) = [one for one in space.pods("pulled") if "deletionTimestamp" not in one["metadata"]]
    assert not [one for one in pod["spec"]["volumes"] if "projected" in one], "no token of Kubernetes is mounted"
