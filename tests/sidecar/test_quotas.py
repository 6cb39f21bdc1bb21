from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice_engine.live_config import TenantConfig
from sluice_sidecar.callers.quotas import WINDOW_S, Quotas
from sluice_sidecar.errors import RateLimit, Reason, Refusal

S = 1_000_000


def quotas(per_second: int = 100) -> Quotas:
    made = Quotas(())
    made.configure((TenantConfig(name="a", tokens_per_second=per_second), TenantConfig(name="free")), 0)
    return made


def told(limit: RateLimit | None) -> RateLimit:
    assert limit is not None
    return limit


def test_who_has_no_quota_is_never_counted() -> None:
    made = quotas()

    assert made.take("free", "r1", 10**9, 0) is None
    assert made.take("stranger", "r2", 10**9, 0) is None


def test_ten_seconds_worth_may_be_used_at_once_and_then_as_it_comes_back() -> None:
    made = quotas()

    assert made.take("a", "r1", 1_000, 0) is None
    limit = told(made.take("a", "r2", 50, 0))
    assert (limit.remaining_tokens, limit.wait_us, limit.full_us) == (0, S // 2, 10 * S)
    assert made.take("a", "r2", 50, limit.wait_us - 1) is not None
    assert made.take("a", "r2", 50, limit.wait_us) is None


def test_a_refusal_for_load_spends_nothing_however_often_it_comes() -> None:
    made = quotas()

    for attempt in range(1_000):
        assert made.take("a", f"r{attempt}", 900, 0) is None
        made.settle(f"r{attempt}", 0)


def test_what_was_reserved_is_replaced_by_what_was_used() -> None:
    made = quotas()
    made.take("a", "long", 1_000, 0)

    made.settle("long", 400)

    assert made.take("a", "next", 600, 0) is None
    assert made.take("a", "more", 1, 0) is not None


def test_an_answer_longer_than_expected_leaves_a_debt() -> None:
    made = quotas()
    made.take("a", "long", 100, 0)

    made.settle("long", 1_500)

    assert told(made.take("a", "next", 1, 0)).wait_us == 5_010_000


def test_a_request_beyond_the_whole_bucket_runs_when_it_is_full() -> None:
    made = quotas()
    made.take("a", "small", 10, 0)

    assert told(made.take("a", "huge", 5_000, 0)).wait_us == S // 10
    assert made.take("a", "huge", 5_000, S // 10) is None
    assert told(made.take("a", "next", 10, S // 10)).wait_us == 40 * S + S // 10


def test_a_changed_quota_remembers_what_was_used() -> None:
    made = quotas()
    made.take("a", "r", 1_000, 0)

    made.configure((TenantConfig(name="a", tokens_per_second=200),), 0)
    assert made.take("a", "next", 1_000, 0) is None
    assert made.take("a", "more", 1, 0) is not None
    made.configure((TenantConfig(name="a"),), 0)
    assert made.take("a", "free", 10**9, 0) is None
    made.settle("r", 10)


def test_the_headers_of_a_quota_refusal_and_of_no_other() -> None:
    limit = RateLimit(
        per_second=100, limit_tokens=1_000, window_s=10, remaining_tokens=12, wait_us=2_400_001, full_us=360_000_000
    )

    headers = Refusal(Reason.TENANT_QUOTA, "over", 2_500_000, rate_limit=limit).headers()

    assert headers["RateLimit-Policy"] == '"tokens";q=1000;w=10'
    assert headers["RateLimit"] == '"tokens";r=12;t=3'
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    assert headers["x-ratelimit-remaining-tokens"] == "12"
    assert headers["x-ratelimit-reset-tokens"] == "6m0s"
    assert int(headers["Retry-After"]) >= 3
    busy = {name.lower() for name in Refusal(Reason.SLOTS, "busy", 2_500_000).headers()}
    assert not {name for name in busy if "ratelimit-" in name or name == "ratelimit"}


@given(
    asked=st.lists(
        st.tuples(st.integers(0, 2 * S), st.integers(1, 1_500), st.sampled_from([0.0, 0.5, 1.0])), max_size=40
    )
)
def test_over_any_time_no_more_is_used_than_the_rate_and_one_bucket_and_one_request(
    asked: list[tuple[int, int, float]],
) -> None:
    made, now_us, used = quotas(), 0, 0
    for number, (pause_us, tokens, share) in enumerate(asked):
        now_us += pause_us
        if made.take("a", str(number), tokens, now_us) is None:
            spent = int(tokens * share)
            made.settle(str(number), spent)
            used += spent

    assert used <= 100 * WINDOW_S + 100 * now_us / S + 1_500
