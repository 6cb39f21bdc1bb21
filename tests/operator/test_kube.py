"""The client of the API server, against a server that records what it is asked; and the watches on top of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration
from prometheus_client import CollectorRegistry

import operator_scene as scene
from sluice_operator import plan
from sluice_operator.__main__ import _crd as wait_for_the_crd
from sluice_operator.cluster import connection, watches
from sluice_operator.cluster.connection import Connection, WatchExpired
from sluice_operator.cluster.kinds import CHILD_KINDS, KINDS, OPTIONAL_KINDS, OWNED_KINDS, RIGHTS
from sluice_operator.cluster.kube import Kube
from sluice_operator.cluster.seen import Place
from sluice_operator.config import Settings
from sluice_operator.errors import ApiRefused, LeaseLost, NamespaceEnds
from sluice_operator.health import Health
from sluice_operator.metrics import Metrics
from sluice_operator.reconcile.reconciler import Reconciler
from sluice_operator.status.changes import Told

Json = dict[str, Any]
ITEM = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat", "namespace": "llm"}, "spec": {}}


@dataclass
class Recorder:
    """Answers by method and path; what is not set answers with an empty object."""

    answers: dict[str, web.Response | list[web.Response]] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str], Any, str]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        text = await request.text()
        where = f"{request.method} {request.path}"
        kind = request.headers.get("Content-Type", "")
        self.asked.append((request.method, request.path, dict(request.query), json.loads(text) if text else None, kind))
        answer = self.answers.get(where, web.json_response({}))
        if isinstance(answer, list):
            return answer.pop(0) if len(answer) > 1 else web.Response(status=500)
        return answer


@dataclass
class Api:
    kube: Kube
    recorder: Recorder


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    recorder = Recorder()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", recorder.handle)
    configuration = Configuration()
    async with TestServer(app) as server:
        configuration.host = str(server.make_url("")).rstrip("/")
        async with ApiClient(configuration) as client:
            yield Api(Kube(Connection(client)), recorder)


def refusal(status: int, reason: str, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "reason": reason, "message": message, "code": status}, status=status)


async def test_apply_is_server_side_forced_and_signed(api: Api) -> None:
    answer = {**ITEM, **ours("chat")}
    api.recorder.answers["PATCH /api/v1/namespaces/llm/services/chat"] = web.json_response(answer)

    await api.kube.apply(ITEM)

    ((method, path, query, sent, kind),) = api.recorder.asked
    assert (method, path) == ("PATCH", "/api/v1/namespaces/llm/services/chat")
    assert query == {"fieldManager": "sluice", "force": "true"}
    assert (sent, kind) == (ITEM, "application/apply-patch+yaml; charset=utf-8")


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        pytest.param("größe-模型", "größe-模型", id="letters as they are"),
        pytest.param("🦙", "🦙", id="an emoji is no pair of escapes"),
        pytest.param("a\u2028b\x85c", "a\\u2028b\\u0085c", id="what YAML takes for a line break is escaped"),
        pytest.param("a\x7f\ufeff", "a\\u007f\\ufeff", id="what YAML does not take is escaped"),
        pytest.param('say "\\ud83e"\n', 'say \\"\\\\ud83e\\"\\n', id="quotes and backslashes"),
    ],
)
def test_what_is_applied_is_json_and_yaml_alike(text: str, sent: str) -> None:
    written = connection.as_yaml({"text": text})

    assert written == '{"text": "' + sent + '"}'
    assert json.loads(written) == yaml.safe_load(written) == {"text": text}


async def test_a_status_is_applied_to_the_very_resource(api: Api) -> None:
    await api.kube.apply_status(scene.body(), {"replicas": 1})

    ((_, path, _, sent, _),) = api.recorder.asked
    assert path == "/apis/sluice.dev/v1alpha1/namespaces/llm/inferenceservices/chat/status"
    assert sent["metadata"] == {"name": "chat", "namespace": "llm", "uid": scene.UID}
    assert sent["status"] == {"replicas": 1}
    assert "spec" not in sent


def listed(api: Api, kind: str, *items: Json, version: str = "50") -> None:
    """What the server has of a kind, in all namespaces."""
    page = {"apiVersion": KINDS[kind].api_version, "metadata": {"resourceVersion": version}, "items": list(items)}
    api.recorder.answers[f"GET {KINDS[kind].prefix}/{KINDS[kind].plural}"] = web.json_response(page)


def ours(name: str, *, number: int = 7, service: str = "chat") -> Json:
    metadata = {"name": name, "namespace": "llm", "resourceVersion": str(number), "managedFields": [{"manager": "x"}]}
    return {"metadata": {**metadata, "labels": {"sluice.dev/inferenceservice": service}}}


async def test_a_service_is_looked_at_as_the_watches_brought_it_without_a_request(api: Api) -> None:
    kinds = [kind for kind in CHILD_KINDS if kind not in OPTIONAL_KINDS]
    waiting = asyncio.create_task(api.kube.observe("llm", "chat", kinds))
    for kind in kinds:
        listed(api, kind)
    listed(api, "Service", ours("chat"), ours("other", service="other"))
    listed(api, "Pod", ours("chat-1"))
    for kind in kinds:
        assert not waiting.done(), "before all was listed, nothing is known"
        await api.kube.list_children(kind, "")
    requests = len(api.recorder.asked)

    seen = await waiting

    assert set(seen.owned) == {("Service", "chat")}
    assert "managedFields" not in seen.owned["Service", "chat"]["metadata"]
    assert [pod["metadata"]["name"] for pod in seen.pods] == ["chat-1"]
    assert len(api.recorder.asked) == requests
    assert {query["labelSelector"] for _, _, query, _, _ in api.recorder.asked} == {
        "app.kubernetes.io/managed-by=sluice-operator"
    }


async def test_what_we_wrote_is_seen_at_once_and_what_the_watch_removes_is_gone(api: Api) -> None:
    listed(api, "Service")
    await api.kube.list_children("Service", "")
    api.recorder.answers["PATCH /api/v1/namespaces/llm/services/chat"] = web.json_response(
        {**ITEM, **ours("chat", number=60)}
    )

    await api.kube.apply(ITEM)
    assert set((await api.kube.observe("llm", "chat", ["Service"])).owned) == {("Service", "chat")}

    gone = {"kind": "Service", **ours("chat", number=61)}
    api.recorder.answers["GET /api/v1/services"] = lines({"type": "DELETED", "object": gone})
    [_ async for _ in api.kube.watch_children("Service", "", "50")]
    assert (await api.kube.observe("llm", "chat", ["Service"])).owned == {}


async def test_what_is_new_is_made_only_where_nothing_has_its_name(api: Api) -> None:
    path = "PATCH /api/v1/namespaces/llm/services/chat"
    api.recorder.answers[path] = web.json_response({**ITEM, **ours("chat")})
    made = await api.kube.create(ITEM)
    api.recorder.answers[path] = refusal(409, "Conflict", "the object has been modified")
    taken = await api.kube.create(ITEM)

    assert (made is not None, taken) == (True, None)
    for _, _, _, sent, _ in api.recorder.asked:
        # No object is of this version: the server changes nothing that is there, and makes what is not.
        assert sent == {**ITEM, "metadata": {"name": "chat", "namespace": "llm", "resourceVersion": "1"}}


async def test_each_request_is_counted(api: Api) -> None:
    counted: list[str] = []
    api.kube._connection.count = counted.append
    listed(api, "Pod")

    await api.kube.list_children("Pod", "")
    with pytest.raises(KeyError):  # the server answers nothing of use
        await api.kube.apply(ITEM)

    assert counted == ["GET", "PATCH"]


async def test_a_list_comes_in_pages_and_is_seen_whole(api: Api) -> None:
    def page(name: str, more: str) -> web.Response:
        metadata = {"resourceVersion": "50", "continue": more}
        return web.json_response({"apiVersion": "v1", "metadata": metadata, "items": [ours(name)]})

    api.recorder.answers["GET /api/v1/pods"] = [page("a", "then"), page("b", ""), page("c", "")]

    assert await api.kube.list_children("Pod", "") == "50"

    assert [pod["metadata"]["name"] for pod in (await api.kube.observe("llm", "chat", ["Pod"])).pods] == ["a", "b"]
    first, second = (query for _, _, query, _, _ in api.recorder.asked)
    assert int(first["limit"]) == int(second["limit"]) <= 500
    assert ("continue" in first, second["continue"]) == (False, "then")


@pytest.mark.parametrize(
    ("environment", "proxy"),
    [
        pytest.param({}, None, id="none"),
        pytest.param({"https_proxy": "http://proxy:3128"}, "http://proxy:3128", id="for all hosts"),
        pytest.param({"https_proxy": "http://proxy:3128", "no_proxy": "api.test"}, None, id="for all hosts but it"),
    ],
)
def test_the_environments_proxy_is_read_once(
    environment: dict[str, str], proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    configuration = Configuration()
    configuration.host = "https://api.test:6443"

    connection.settle_environment(configuration)

    assert configuration.proxy == proxy
    assert configuration.client_session_kwargs == {"trust_env": False}


async def test_a_refusal_carries_the_servers_own_words(api: Api) -> None:
    api.recorder.answers["PATCH /api/v1/namespaces/llm/services/chat"] = refusal(422, "Invalid", "spec.ports: Required")

    with pytest.raises(ApiRefused, match=r"spec\.ports: Required") as refused:
        await api.kube.apply(ITEM)

    assert (refused.value.status, refused.value.reason) == (422, "Invalid")


async def test_an_object_that_is_not_of_its_type_is_a_refusal_for_good(api: Api) -> None:
    text = "failed to create typed patch object (llm/chat; apps/v1, Kind=Deployment): .spec.x: expected map, got &{7}"
    item = scene.deployment()
    item["metadata"]["namespace"] = "llm"
    api.recorder.answers["PATCH /apis/apps/v1/namespaces/llm/deployments/chat"] = refusal(500, "InternalError", text)

    with pytest.raises(ApiRefused) as refused:
        await api.kube.apply(item)

    assert (refused.value.status, refused.value.message) == (422, text)


@pytest.mark.parametrize(
    ("told", "retry_after_s"),
    [
        pytest.param({"Retry-After": "7"}, 7, id="in seconds"),
        pytest.param({}, 0, id="not at all"),
        pytest.param({"Retry-After": "Mon, 30 Nov 2026 17:00:00 GMT"}, 0, id="as a date, which the server never sends"),
    ],
)
async def test_a_busy_server_says_when_to_come_back(api: Api, told: dict[str, str], retry_after_s: float) -> None:
    busy = web.Response(status=429, text="Too many requests, please try again later.", headers=told)
    api.recorder.answers["PATCH /api/v1/namespaces/llm/services/chat"] = busy

    with pytest.raises(ApiRefused) as refused:
        await api.kube.apply(ITEM)

    assert (refused.value.status, refused.value.retry_after_s) == (429, retry_after_s)


async def test_a_namespace_that_ends_is_told_apart(api: Api) -> None:
    status = {"reason": "Forbidden", "message": "no", "details": {"causes": [{"reason": "NamespaceTerminating"}]}}
    answer = web.json_response(status, status=403)
    api.recorder.answers["PATCH /api/v1/namespaces/llm/services/chat"] = answer

    with pytest.raises(NamespaceEnds):
        await api.kube.apply(ITEM)


async def test_an_answer_that_is_no_json_is_a_refusal_too(api: Api) -> None:
    api.recorder.answers["PATCH /api/v1/namespaces/llm/services/chat"] = web.Response(status=502, text="<html>bad")

    with pytest.raises(ApiRefused, match="<html>bad"):
        await api.kube.apply(ITEM)


async def test_what_is_not_there_is_none_and_may_be_deleted(api: Api) -> None:
    api.recorder.answers["DELETE /api/v1/namespaces/llm/services/chat"] = refusal(404, "NotFound", "not found")
    page = {"apiVersion": "v1", "items": []}
    api.recorder.answers["GET /api/v1/namespaces/llm/services"] = web.json_response(page)

    assert await api.kube.read("Service", "llm", "chat") is None
    ((_, _, query, _, _),) = api.recorder.asked
    assert query == {"fieldSelector": "metadata.name=chat"}
    await api.kube.delete(("Service", "chat"), "llm")


@pytest.mark.parametrize(
    ("answer", "served"),
    [
        pytest.param(web.json_response({"resources": [{"name": "inferenceservices"}]}), True, id="it is there"),
        pytest.param(web.json_response({"resources": [{"name": "others"}]}), False, id="another kind of its group is"),
        pytest.param(web.Response(status=404), False, id="its group is not there"),
    ],
)
async def test_it_knows_whether_a_kinds_definition_is_there(api: Api, answer: web.Response, *, served: bool) -> None:
    api.recorder.answers["GET /apis/sluice.dev/v1alpha1"] = answer

    assert await api.kube.serves("InferenceService") is served


async def test_a_start_sits_out_an_api_server_that_does_not_answer(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice_operator.__main__._CRD_RETRY_S", 0)
    served = web.json_response({"resources": [{"name": "inferenceservices"}]})
    answers = [refusal(503, "ServiceUnavailable", "later"), refusal(404, "NotFound", "no"), served, served]
    api.recorder.answers["GET /apis/sluice.dev/v1alpha1"] = answers

    await wait_for_the_crd(api.kube)

    assert len(api.recorder.asked) == 3


async def test_whether_a_definition_is_there_is_not_guessed_from_an_error(api: Api) -> None:
    api.recorder.answers["GET /apis/keda.sh/v1alpha1"] = web.Response(status=503)

    with pytest.raises(ApiRefused):
        await api.kube.serves("ScaledObject")


@pytest.mark.parametrize(
    ("namespaces", "paths"),
    [
        pytest.param((), ["/apis/sluice.dev/v1alpha1/inferenceservices"], id="all at once"),
        pytest.param(
            ("a", "b"),
            [f"/apis/sluice.dev/v1alpha1/namespaces/{name}/inferenceservices" for name in "ab"],
            id="each that is watched",
        ),
    ],
)
async def test_services_are_listed_where_they_are_watched(
    api: Api, namespaces: tuple[str, ...], paths: list[str]
) -> None:
    for path in paths:
        page = {"apiVersion": "sluice.dev/v1alpha1", "items": [{"metadata": {"name": "x"}}]}
        api.recorder.answers[f"GET {path}"] = web.json_response(page)

    listed = await api.kube.list_services(namespaces)

    assert [path for _, path, _, _, _ in api.recorder.asked] == paths
    assert {(item["kind"], item["apiVersion"]) for item in listed} == {("InferenceService", "sluice.dev/v1alpha1")}


async def test_an_event_names_the_resource_and_is_counted_up_in_place(api: Api) -> None:
    first, second = "2026-01-01T00:00:00Z", "2026-01-01T00:05:00Z"
    once = Told(kind="Warning", reason="ModelMissing", message="no such folder", first=first, last=first)
    for told in (once, replace(once, last=second, count=2), replace(once, first=second, last=second)):
        await api.kube.post_event(scene.body(), told)

    (method, path, _, sent, _), (_, again, _, more, _), (_, another, _, _, _) = api.recorder.asked
    assert method == "PATCH"
    assert path.startswith("/api/v1/namespaces/llm/events/chat.")
    assert sent["involvedObject"]["uid"] == scene.UID
    assert (sent["type"], sent["reason"], sent["message"]) == ("Warning", "ModelMissing", "no such folder")
    assert again == path
    assert (more["count"], more["firstTimestamp"], more["lastTimestamp"]) == (2, first, second)
    assert another != path, "an operator that starts anew does not count a former one's down"


async def test_the_kubelets_events_are_asked_for_by_pod_and_for_a_few_pods_only(api: Api) -> None:
    path = "/api/v1/namespaces/llm/events"
    pages = [web.json_response({"items": [{"reason": "FailedMount"}]}) for _ in range(4)]
    api.recorder.answers[f"GET {path}"] = pages

    found = await api.kube.pod_events("llm", {f"pod-{number}": f"uid-{number}" for number in range(1000)})

    assert found == {f"pod-{number}": [{"reason": "FailedMount"}] for number in range(3)}
    assert len(api.recorder.asked) == 3
    _, _, query, _, _ = api.recorder.asked[0]
    assert query["fieldSelector"] == "involvedObject.kind=Pod,involvedObject.name=pod-0,involvedObject.uid=uid-0"


async def test_a_lease_is_created_and_then_replaced_where_it_is_still_as_it_was_read(api: Api) -> None:
    lease: Json = {"metadata": {"namespace": "system", "name": "sluice"}, "spec": {}}
    path = "/apis/coordination.k8s.io/v1/namespaces/system/leases"
    api.recorder.answers[f"GET {path}/sluice"] = refusal(404, "NotFound", "not found")

    assert await api.kube.read_lease("system", "sluice") is None
    await api.kube.write_lease(lease)
    await api.kube.write_lease({**lease, "metadata": {**lease["metadata"], "resourceVersion": "7"}})

    assert [(method, where) for method, where, *_ in api.recorder.asked[1:]] == [
        ("POST", path),
        ("PUT", f"{path}/sluice"),
    ]
    assert api.recorder.asked[-1][3]["metadata"]["resourceVersion"] == "7"


async def test_who_lost_the_lease_writes_nothing(api: Api) -> None:
    api.kube.may_act = lambda: False

    for write in (
        api.kube.apply(ITEM),
        api.kube.apply_status(scene.body(), {}),
        api.kube.delete(("Service", "chat"), "llm"),
        api.kube.post_event(scene.body(), Told(kind="Normal", reason="Ready", message="", first="", last="")),
    ):
        with pytest.raises(LeaseLost):
            await write

    assert api.recorder.asked == []


def lines(*events: Json) -> web.Response:
    return web.Response(text="".join(json.dumps(event) + "\n" for event in events))


def event(kind: str, version: str, name: str | None = "chat") -> Json:
    metadata = {
        "name": "chat-1",
        "resourceVersion": version,
        "namespace": "llm",
        "labels": {"sluice.dev/inferenceservice": name} if name else {},
    }
    return {"type": kind, "object": {"kind": "Pod", "metadata": metadata}}


async def test_a_watch_follows_our_children_with_bookmarks(api: Api) -> None:
    api.recorder.answers["GET /api/v1/pods"] = lines(event("ADDED", "5"), event("BOOKMARK", "9", None))

    seen = [one async for one in api.kube.watch_children("Pod", "", "4")]

    assert seen == [("5", [("llm", "chat")]), ("9", [])]
    ((_, _, query, _, _),) = api.recorder.asked
    assert query["labelSelector"] == "app.kubernetes.io/managed-by=sluice-operator"
    assert (query["resourceVersion"], query["allowWatchBookmarks"]) == ("4", "true")
    assert int(query["timeoutSeconds"]) > 0


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(refusal(410, "Expired", "too old resource version"), id="as an answer"),
        pytest.param(lines({"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}), id="as an event"),
    ],
)
async def test_a_version_that_is_too_old_ends_the_watch(api: Api, answer: web.Response) -> None:
    api.recorder.answers["GET /api/v1/pods"] = answer

    with pytest.raises(WatchExpired):
        [_ async for _ in api.kube.watch_children("Pod", "", "4")]


class Script:
    """Children whose watches end as the script says; after it, the test's task is told."""

    def __init__(self, *streams: list[tuple[str, list[Place]]] | Exception) -> None:
        self.streams, self.calls, self.over = list(streams), list[str](), asyncio.Event()

    async def list_children(self, kind: str, namespace: str) -> str:
        self.calls.append("list")
        return "10"

    async def serves(self, kind: str) -> bool:
        raise AssertionError("the kinds of every cluster are not looked for")

    async def watch_children(self, kind: str, namespace: str, since: str) -> AsyncIterator[tuple[str, list[Place]]]:
        self.calls.append(f"watch {since}")
        if not self.streams:
            self.over.set()
            await asyncio.Event().wait()
        stream = self.streams.pop(0)
        if isinstance(stream, Exception):
            raise stream
        for one in stream:
            yield one


@pytest.mark.parametrize(
    ("streams", "calls"),
    [
        pytest.param(
            ([("11", [("llm", "chat")]), ("15", [])],),
            ["list", "watch 10", "watch 15"],
            id="a stream that ends goes on where it was",
        ),
        pytest.param((WatchExpired(),), ["list", "watch 10", "list", "watch 10"], id="an expired one lists again"),
        pytest.param(
            (ApiRefused(403, "Forbidden", "no"),),
            ["list", "watch 10", "list", "watch 10"],
            id="a refused one lists again",
        ),
        pytest.param((TimeoutError(),), ["list", "watch 10", "list", "watch 10"], id="a silent one lists again"),
    ],
)
async def test_a_watch_never_ends(streams: tuple[Any, ...], calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "_RETRY_S", 0)
    script, metrics = Script(*streams), Metrics(CollectorRegistry())
    reconciler = Reconciler(
        scene.FakeCluster(), scene.FakeGates(), Settings(images=scene.IMAGES), metrics,
        clock=lambda: 0.0, wall_clock=lambda: 0.0, now=lambda: "",
    )  # fmt: skip
    touched: list[tuple[str, str]] = []
    monkeypatch.setattr(reconciler, "touch", lambda *place: touched.append(place))
    following = asyncio.create_task(
        watches.follow(script, "Pod", "", reconciler, health=Health(lambda: 0.0), metrics=metrics)
    )

    async with asyncio.timeout(10):
        await script.over.wait()
    following.cancel()

    assert script.calls == calls
    assert touched == [("llm", "chat")] * sum(isinstance(stream, list) for stream in streams)


class Optional(Script):
    """A kind whose definition is there or not, as the script says; then as it was."""

    def __init__(self, *served: bool) -> None:
        super().__init__(ApiRefused(404, "NotFound", "the server could not find the requested resource"))
        self.served = list(served)

    async def serves(self, kind: str) -> bool:
        self.calls.append("serves")
        return self.served.pop(0) if len(self.served) > 1 else self.served[0]


async def test_an_optional_kind_is_followed_from_the_moment_its_definition_is_there_and_may_go_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watches, "_RETRY_S", 0)
    monkeypatch.setattr(watches, "_DISCOVERY_S", 0)
    script, metrics = Optional(False, True, False, True), Metrics(CollectorRegistry())
    reconciler = Reconciler(
        scene.FakeCluster(), scene.FakeGates(), Settings(images=scene.IMAGES), metrics,
        clock=lambda: 0.0, wall_clock=lambda: 0.0, now=lambda: "",
    )  # fmt: skip
    found: list[bool] = []
    monkeypatch.setattr(reconciler, "discovered", lambda _, *, is_served: found.append(is_served))
    following = asyncio.create_task(
        watches.follow(script, "ScaledObject", "", reconciler, health=Health(lambda: 0.0), metrics=metrics)
    )

    async with asyncio.timeout(10):
        await script.over.wait()
    following.cancel()

    assert found == [False, True, False, True]
    assert script.calls == ["serves", "serves", "list", "watch 10", "serves", "serves", "list", "watch 10"]


def test_no_right_is_wider_than_the_verbs_that_are_used() -> None:
    for (group, resource), verbs in RIGHTS.items():
        assert "*" not in {group, resource, *verbs}
    for name, kind in KINDS.items():
        assert ("create" in kind.verbs) == ("patch" in kind.verbs) == (name in OWNED_KINDS)
        assert "delete" not in kind.verbs or name in OWNED_KINDS
    # Every service has them as long as it exists, and then its owner reference ends them.
    kept = {name for name in OWNED_KINDS if "delete" not in KINDS[name].verbs}
    assert kept == plan._NEVER_UNUSED
