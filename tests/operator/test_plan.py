"""What is sent: everything that is missing or changed, nothing else, and never to what is not ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import operator_scene as scene
from sluice_engine import codec
from sluice_operator.cluster.kinds import KINDS, OWNED_KINDS
from sluice_operator.plan import Applied, Key, Observed, Plan, key, plan, version
from sluice_operator.rendering.pod_template import Object
from sluice_operator.rendering.render import objects

DESIRED = objects(scene.spec(), scene.IMAGES)


def as_held(item: Object, *, number: int = 1, uid: str = scene.UID) -> Object:
    """The object as the API server has it after it was applied."""
    owner = {**item["metadata"]["ownerReferences"][0], "uid": uid}
    metadata = {**item["metadata"], "uid": f"uid-{number}", "resourceVersion": str(number), "ownerReferences": [owner]}
    return {**item, "metadata": metadata}


def held(*items: Object) -> tuple[dict[Key, Object], dict[Key, Applied]]:
    owned = {key(item): as_held(item, number=number) for number, item in enumerate(items)}
    applied = {
        found: Applied(digest=codec.digest(item), version=version(owned[found]))
        for item in items
        if (found := key(item))
    }
    return owned, applied


def test_all_is_created_where_nothing_is() -> None:
    todo = plan(DESIRED, scene.UID, Observed(), {})

    assert todo.create == DESIRED
    assert (todo.update, todo.delete, todo.foreign) == ((), (), ())


def test_nothing_is_sent_when_all_is_as_it_was_applied() -> None:
    owned, applied = held(*DESIRED)

    assert plan(DESIRED, scene.UID, Observed(owned=owned), applied) == Plan()


@given(st.sets(st.sampled_from(range(len(DESIRED)))))
def test_exactly_what_drifted_is_sent_again(drifted: set[int]) -> None:
    owned, applied = held(*DESIRED)
    for index in drifted:
        owned[key(DESIRED[index])]["metadata"]["resourceVersion"] = "9999"

    todo = plan(DESIRED, scene.UID, Observed(owned=owned), applied)

    assert [key(item) for item in todo.update] == [key(DESIRED[index]) for index in sorted(drifted)]


def test_a_status_that_moves_is_no_drift() -> None:
    owned, applied = held(*DESIRED)
    deployment = next(item for item in owned.values() if item["kind"] == "Deployment")
    deployment["metadata"]["generation"] = 3
    applied["Deployment", "chat"] = Applied(digest=applied["Deployment", "chat"].digest, version=version(deployment))

    deployment["metadata"]["resourceVersion"] = "12345"

    assert plan(DESIRED, scene.UID, Observed(owned=owned), applied) == Plan()


def test_after_a_restart_everything_is_applied_once_more() -> None:
    owned, _ = held(*DESIRED)

    todo = plan(DESIRED, scene.UID, Observed(owned=owned), {})

    assert [key(item) for item in todo.update] == [key(item) for item in DESIRED]


def test_what_belongs_to_another_owner_is_left_alone() -> None:
    owned, applied = held(*DESIRED)
    owned["Service", "chat"] = as_held(owned["Service", "chat"], uid="somebody-else")

    todo = plan(DESIRED, scene.UID, Observed(owned=owned), applied)

    assert todo == Plan(foreign=(("Service", "chat"),))


def test_what_is_being_deleted_is_waited_for() -> None:
    owned, _ = held(*DESIRED)
    owned["Service", "chat"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    todo = plan(DESIRED, scene.UID, Observed(owned=owned), {})

    assert ("Service", "chat") not in [key(item) for item in (*todo.create, *todo.update)]


@pytest.mark.parametrize(
    "kind", [one for one in OWNED_KINDS if "delete" in KINDS[one].verbs and one not in {"ConfigMap", "ServiceAccount"}]
)
def test_what_is_not_wanted_any_more_goes_whatever_its_kind(kind: str) -> None:
    owned, applied = held(*DESIRED)
    ours = as_held({**config_map("chat-extra"), "kind": kind})
    owned[kind, "chat-extra"] = ours
    theirs = as_held({**config_map("theirs"), "kind": kind}, uid="somebody-else")
    owned[kind, "theirs"] = theirs
    leaving = as_held({**config_map("leaving"), "kind": kind})
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    owned[kind, "leaving"] = leaving

    assert plan(DESIRED, scene.UID, Observed(owned=owned), applied) == Plan(delete=((kind, "chat-extra"),))


def config_map(name: str) -> Object:
    template = next(item for item in DESIRED if item["kind"] == "ConfigMap")
    return as_held({**template, "metadata": {**template["metadata"], "name": name}})


def test_an_old_config_map_stays_while_a_replica_set_names_it() -> None:
    owned, applied = held(*DESIRED)
    owned["ConfigMap", "chat-config-old"] = config_map("chat-config-old")
    named = scene.replica_set("old", 1, config_maps=("chat-config-old",))

    assert plan(DESIRED, scene.UID, Observed(owned=owned, replica_sets=[named]), applied) == Plan()
    assert plan(DESIRED, scene.UID, Observed(owned=owned), applied).delete == (("ConfigMap", "chat-config-old"),)


def test_a_config_map_of_somebody_else_is_never_deleted() -> None:
    owned, applied = held(*DESIRED)
    owned["ConfigMap", "theirs"] = as_held(config_map("theirs"), uid="somebody-else")

    assert plan(DESIRED, scene.UID, Observed(owned=owned), applied) == Plan()


def test_an_account_of_ours_goes_once_the_user_names_their_own() -> None:
    owned, applied = held(*DESIRED)
    desired = objects(scene.spec({"podTemplate": {"serviceAccountName": "mine"}}), scene.IMAGES)

    assert ("ServiceAccount", "chat") not in plan(desired, scene.UID, Observed(owned=owned), applied).delete
    owned["Deployment", "chat"] = as_held(next(item for item in desired if item["kind"] == "Deployment"))
    assert plan(desired, scene.UID, Observed(owned=owned), applied).delete == (("ServiceAccount", "chat"),)


def test_an_account_stays_while_a_replica_set_names_it() -> None:
    owned, applied = held(*objects(scene.spec({"podTemplate": {"serviceAccountName": "mine"}}), scene.IMAGES))
    owned["ServiceAccount", "chat"] = as_held(next(item for item in DESIRED if item["kind"] == "ServiceAccount"))
    named = scene.replica_set("old", 1)
    named["spec"]["template"]["spec"]["serviceAccountName"] = "chat"
    desired = objects(scene.spec({"podTemplate": {"serviceAccountName": "mine"}}), scene.IMAGES)

    assert plan(desired, scene.UID, Observed(owned=owned, replica_sets=[named]), applied).delete == ()
