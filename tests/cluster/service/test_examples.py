"""The examples against the real API server: the good ones are taken, the bad ones refused with their message."""

from __future__ import annotations

import pytest
import yaml

from cluster.service.space import EXAMPLES, Space, example

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("name", ["minimal", "full", "demo-cpu", "model-on-a-claim", "hugging-face", "vllm", "sglang"])
def test_the_api_server_takes_a_good_example(space: Space, name: str) -> None:
    manifest = example(name)
    manifest["metadata"].pop("namespace", None)

    said = space.kubectl("apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(manifest))

    assert "created (server dry run)" in said


def test_the_api_server_refuses_every_bad_example_with_the_message_that_it_names(space: Space) -> None:
    files = sorted(EXAMPLES.glob("invalid-*.yaml"))
    assert files
    for file in files:
        expected = file.read_text().splitlines()[0].removeprefix("# expect: ")

        refusal = space.refusal(example(file.stem))

        assert expected in refusal, f"{file.name}: {refusal}"
