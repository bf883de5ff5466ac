"""A runner whose trainings are replaced by known records: what a run, its files and the display have of them; networks
that are kept for a resumed call."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from phantom_parallel.distributed.signals import Interrupted, LossDiverged, StopRequest
from phantom_parallel.families.ffn.config import FFNTrainConfig
from phantom_parallel.study import runner as runner_module
from phantom_parallel.study.runner import NETWORKS, CellRunner, RunOptions, resolve_networks
from phantom_parallel.study.settings import read_settings
from phantom_parallel.train import Record
from phantom_parallel.utils.files import write_json
from phantom_parallel.utils.network import Network
from phantom_parallel.utils.progress import ProgressDisplay

CONFIG = FFNTrainConfig.of(width=16, depth=1, strategy="tensor", samples=64, batch=8, steps=20, lr=0.5, seed=7)
TIMES = {"seconds": 2.0, "samples_per_second": 40.0, "compute_seconds": 3.0, "blocked_seconds": 1.0}
RECORD = Record(step=10, loss=0.5, eval_loss=0.4, lr=0.5, blocked_share=0.25, **TIMES)
RECORDS = (RECORD, replace(RECORD, step=20, eval_loss=0.3, seconds=4.0, compute_seconds=6.0, blocked_seconds=2.0))


@pytest.fixture
def runner(tmp_path) -> CellRunner:
    settings = read_settings("presets", "quick", {"ranks": 1})
    return CellRunner(torch.device("cpu"), settings, RunOptions(tmp_path), ProgressDisplay(show=False), StopRequest())


def trains(monkeypatch, records=RECORDS, error: Exception | None = None) -> list[FFNTrainConfig]:
    """Let trainings report these records and end, or raise; returns the list of trainings that were run."""
    run: list[FFNTrainConfig] = []

    def train(config, context, report, finish):
        run.append(config)
        for record in records:
            report(record)
        if error is not None:
            raise error
        return None, SimpleNamespace(status="target")

    monkeypatch.setattr("phantom_parallel.study.runner.train", train)
    return run


def test_a_run_has_the_totals_of_its_last_record(monkeypatch, runner):
    trains(monkeypatch)
    run = runner.train("tensor seed=7", CONFIG)
    assert (run.seed, run.lr, run.status, run.steps, run.loss) == (7, 0.5, "target", 20, 0.3)
    assert (run.seconds, run.compute_seconds, run.blocked_seconds) == (4.0, 6.0, 2.0)
    watts = runner.power(1)
    assert run.joules == 6.0 * watts.compute_watts + 2.0 * watts.communication_watts
    assert [(point.step, point.loss, point.seconds) for point in run.curve] == [(10, 0.4, 2.0), (20, 0.3, 4.0)]
    assert (run.step_seconds, run.blocked_share) == (0.2, 0.25)
    unsplit = {"blocked_share": None, "compute_seconds": None, "blocked_seconds": None}
    trains(monkeypatch, tuple(replace(record, **unsplit) for record in RECORDS))
    run = runner.train("tensor not split", CONFIG)
    assert (run.seconds, run.compute_seconds, run.blocked_share, run.joules) == (4.0, None, None, None)


def test_a_diverged_run_has_no_loss(monkeypatch, runner):
    trains(monkeypatch, RECORDS[:1], LossDiverged("non-finite"))
    run = runner.train("tensor", CONFIG)
    assert (run.status, run.loss, run.steps) == ("diverged", None, 10)
    trains(monkeypatch, (), LossDiverged("non-finite"))
    run = runner.train("tensor at once", CONFIG)
    assert (run.status, run.steps, run.step_seconds, run.joules) == ("diverged", 0, None, None)


def test_a_signal_stops_ahead_of_the_next_cell(monkeypatch, runner):
    run = trains(monkeypatch)
    monkeypatch.setattr(StopRequest, "requested", True)
    with pytest.raises(Interrupted):
        runner.train("tensor", CONFIG)
    assert run == []


HOSTS = read_settings("studies", "links", {"links": ("loopback", "100mbit", "like:frontier-mi250x")})


def test_a_link_has_its_rate_and_a_measured_one_is_kept_for_a_resumed_call(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "why_unavailable", lambda: None)
    known = Network(4, "like:frontier-mi250x", rate=5e7)
    write_json(tmp_path / NETWORKS, {known.link: asdict(known)})
    networks, reason = resolve_networks(HOSTS, "fp32", tmp_path)
    assert {link: network.rate for link, network in networks.items()} == {"100mbit": 1e8, known.link: 5e7}
    assert reason is None
