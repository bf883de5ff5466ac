"""Simulated arrivals, by hand and by queueing theory."""

import pytest

from phantom_parallel.study.arrivals import Phase, Request, poisson, read_trace, serve


def test_a_trace_by_hand(tmp_path):
    """Two wait for the first and are answered together, a long prompt for both; then nobody is there for 3 s."""
    path = tmp_path / "trace.csv"
    path.write_text("prompt_tokens,output_tokens,seconds\n8,3,0.5\n4,2,0\n4,1,1\n4,2,12\n")
    requests = read_trace(path)
    assert requests[1] == Request(0.5, 8, 3)
    served = serve(requests, 2, 4, Phase(2.0, 20.0), Phase(1.0, 5.0), idle_watts=1.0)
    # 0 to 3; from 3, prompts of 8 take 4 s: the answer of one token is ready at 7, the other at 9; 12 to 15
    latencies = [3.0, 9 - 0.5, 7 - 1.0, 3.0]
    assert served["latency_p50"] == pytest.approx((3.0 + 6.0) / 2)
    assert max(latencies) > served["latency_p99"] > served["latency_p95"] > 6.0
    assert served["idle_share"] == pytest.approx(3 / 15)
    assert served["served_joules_per_token"] == pytest.approx((25 + 40 + 10 + 25 + 3) / 8)
    path.write_text("seconds,prompt\n1,2\n")
    with pytest.raises(ValueError, match="with the columns seconds, prompt_tokens, output_tokens"):
        read_trace(path)


def test_a_queue_of_equal_requests_is_that_of_theory():
    """M/D/1 at a load of 0.4: idle for 0.6 of the time, and so most requests do not wait."""
    served = serve(poisson(0.4, 20_000, 4, 6, seed=0), 1, 4, Phase(0.5, 0.0), Phase(0.1, 0.0), idle_watts=60.0)
    assert served["idle_share"] == pytest.approx(0.6, abs=0.01)
    assert served["latency_p50"] == pytest.approx(1.0)
    wait = 1.539  # where Erlang's (1-r) sum_k (r(k-t))^k / k! exp(-r(k-t)), k from 0 to t, is 0.95
    assert served["latency_p95"] == pytest.approx(1.0 + wait, rel=0.04)
    assert served["served_joules_per_token"] == pytest.approx(60 * 0.6 / 0.4 / 6, rel=0.03)
