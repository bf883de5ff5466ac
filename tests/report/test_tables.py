"""Tables and CSV files: the numbers of the runs, and words where there are none."""

import csv
import io
from dataclasses import replace
from statistics import fmean

import pytest
from rich.console import Console

from benchmarks.tables import markdown
from phantom_parallel.report import tables
from phantom_parallel.study.analysis import ratio
from tests.study.sample import STUDIES, make_links, make_results

MANY = ("phantom", "phantom-copies", "tensor", "megatron", "copies", "fsdp", "tensor+int8")


def rows(sections):
    return {(number, row[0]): row[1:] for number, section in enumerate(sections) for row in section.rows}


def printed(results, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(tables.terminal_table(results))
    return console.export_text()


def test_details_of_a_comparison_are_the_numbers_of_its_runs():
    results = make_results()
    values = rows(tables.detailed_sections(results))
    runs = results.cells[1].runs
    seconds, steps = fmean(run.seconds for run in runs), fmean(run.steps for run in runs)
    assert values[0, "time to the loss"][1] == f"{seconds:.2f} s"
    assert values[0, "steps to the loss"][1] == f"{steps:.0f}"
    assert values[0, "FLOPs to the loss"][1] == f"{steps * 0.81:.1f} GFLOP"
    assert values[0, "bytes exchanged to the loss"][1] == f"{steps * 4.194304:.0f} MB"
    assert values[0, "reached the target"] == ("3 of 3",) * 3
    assert values[0, "learning rate"] == ("0.004", "0.002", "0.002")
    assert values[0, "share of time blocked"] == ("15.0 %", "55.0 %", "40.0 %")
    assert values[0, "inference latency, batch 64"] == ("4.2 ms", "13 ms", "9.24 ms")
    assert values[0, "energy, measured"] == ("unavailable",) * 3
    shares = [str(ratio(results, results.cells[0], cell, "seconds")) for cell in results.cells[1:]]
    assert values[1, "time to the loss"] == ("–", *shares)  # noqa: RUF001


def test_what_missed_the_target_is_said_to_have_missed_it():
    values = rows(tables.detailed_sections(make_results(missed=("tensor",))))
    for label in ("steps to the loss", "time to the loss", "FLOPs to the loss", "modelled energy to the loss"):
        assert values[0, label][1] == "missed"
        assert values[0, label][0] != "missed"
    assert values[1, "time to the loss"][1] == "missed"
    assert values[1, "step time"][1] not in ("missed", "unavailable")
    results = make_results()
    cell = replace(results.cells[1], runs=tuple(replace(run, status="differs") for run in results.cells[1].runs))
    unsplit = replace(results.cells[0], runs=tuple(replace(run, compute_seconds=None) for run in results.cells[0].runs))
    assert rows(tables.detailed_sections(replace(results, cells=(unsplit,))))[0, "share of time blocked"] == (
        "not split",
    )
    wrong = replace(results, cells=(results.cells[0], cell))
    assert rows(tables.main_sections(wrong))[0, "tensor"][4] == "error"


@pytest.mark.parametrize("results", [make_results(MANY), *(make() for make in STUDIES.values())], ids=lambda r: r.name)
def test_the_terminal_has_80_columns_and_no_broken_numbers(results):
    text = printed(results)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text
    wide = printed(results, 200)
    assert [line.split() for line in text.splitlines()] == [line.split() for line in wide.splitlines()]


def test_studies_of_links_and_batches_have_a_column_for_each():
    sections = tables.main_sections(make_links())
    assert sections[0].headings[1:] == ("loopback, batch 64", "100mbit, batch 64", "100mbit, batch 512")
    assert rows(sections)[0, "tensor"] == ("1 s", "12 s", "40 s")
    assert rows(sections)[0, "fsdp"][2] == "missed"
    links = tables.main_sections(make_links((("loopback", 64), ("100mbit", 64))))
    assert links[0].headings[1:] == ("loopback", "100mbit")


def test_markdown_has_the_same_rows_and_escapes():
    results = make_results()
    text = markdown(tables.detailed_sections(results))
    assert len({line.count("|") for line in text.splitlines()}) == 1
    assert "| **ratio, below 1 is less** |" in text
    odd = markdown([tables.Section(("a|b", "<i>"), (("x", "y"),))])
    assert odd.startswith("| a\\|b | &lt;i> |")


def test_csv_files_have_every_number():
    results = make_results(missed=("tensor",))
    files = {name: list(csv.DictReader(io.StringIO(text))) for name, text in tables.csv_files(results).items()}
    assert set(files) == {"cells.csv", "runs.csv", "ratios.csv", "curve.csv", "trials.csv"}
    run = results.cells[2].runs[1]
    (row,) = (row for row in files["runs.csv"] if (row["strategy"], row["seed"]) == ("megatron", "1"))
    assert (float(row["seconds"]), float(row["step_seconds"])) == (run.seconds, run.step_seconds)
    tensor = next(row for row in files["cells.csv"] if row["strategy"] == "tensor")
    assert (tensor["seconds_mean"], tensor["reached"]) == ("", "0")
    assert float(tensor["inference_batch_64_latency_seconds"]) == pytest.approx(0.01302)
    assert len(files["curve.csv"]) == sum(len(run.curve) for cell in results.cells for run in cell.runs)
    time = next(row for row in files["ratios.csv"] if (row["to"], row["measure"]) == ("megatron", "seconds"))
    assert float(time["mean"]) == ratio(results, results.cells[0], results.cells[2], "seconds").mean
    links = list(csv.DictReader(io.StringIO(tables.csv_files(make_links())["cells.csv"])))
    assert (links[-1]["strategy"], links[-1]["link"], links[-1]["batch"]) == ("fsdp", "100mbit", "512")
