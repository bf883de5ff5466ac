import csv
import io
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import tables as pages
from phantom_parallel.report import study_tables, tables
from phantom_parallel.report.csv_files import csv_files
from phantom_parallel.study.results import Cell, Interval, Ratio
from phantom_parallel.study.units import format_interval, format_measure, format_ratio, quantity, scale
from tests.study.sample import make_comparison, make_regime, make_study, one_ratio


def rows(found):
    return {
        row.label if number == 0 else f"ratio: {row.label}": row.cells
        for number, section in enumerate(tables.comparison_sections(found))
        for row in section.rows
    }


def printed(table, width=160):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (59.96, "s", "60 s"),
        (1234.0, "s", "20.6 min"),
        (9000.0, "s", "2.5 h"),
        (0.0009999, "s", "1 ms"),
        (41250.0, "J", "41.2 kJ"),
        (2.4e-5, "J", "24 µJ"),
        (4_194_304, "B", "4.19 MB"),
        (9.23e10, "FLOP", "92.3 GFLOP"),
        (999.7, "J", "1 kJ"),
        (0.153, "%", "15.3 %"),
        (1234.4, "steps", "1,234"),
        (0, "B", "0 B"),
        (2_100_000, "", "2,100,000"),
        (0.0512345, "", "0.0512"),
    ],
)
def test_quantities_have_human_units(value, unit, text):
    assert quantity(value, unit) == text


def test_values_beside_each_other_have_one_unit():
    column = [59.8, 66.4, 168.6]
    assert [quantity(value, "s", column) for value in column] == ["59.8 s", "66.4 s", "169 s"]
    assert quantity(168.6, "s") == "2.81 min"
    joules = [1001.0, 1130.0, None]
    assert [format_measure(value, "joules", among=joules) for value in joules] == ["1 kJ", "1.13 kJ", "unavailable"]
    assert [quantity(value, "s", [0.0294, 1.42]) for value in (0.0294, 1.42)] == ["29.4 ms", "1,420 ms"]
    assert quantity(0.0, "J", [0.0, 5.0]) == "0 J"


def test_an_axis_takes_the_unit_of_its_largest_value():
    assert scale([0.001, 0.03], "s") == (1e-3, "ms")
    assert scale([5.0, 3e4], "J") == (1e3, "kJ")


def test_shares_keep_two_digits():
    assert [format_ratio(one) for one in (0.314, 1.0, 0.0312, 12.345, 123.4)] == [
        "0.31",
        "1.00",
        "0.031",
        "12.35",
        "123",
    ]


def test_rows_of_a_comparison_are_the_numbers_of_its_runs():
    found = make_comparison()
    table = rows(found)
    runs = [run for run in found.runs if run.strategy == "tensor"]
    seconds, steps = sum(run.seconds for run in runs) / 3, sum(run.steps for run in runs) / 3
    assert table["time to the loss"][1] == f"{seconds:.2f} s"
    assert table["steps to the loss"][1] == f"{steps:.0f}"
    assert table["FLOPs to the loss"][1] == f"{steps * 0.81:.1f} GFLOP"
    assert table["bytes exchanged to the loss"][1] == f"{steps * 4.194304:.0f} MB"
    assert table["reached the target"] == ("3 of 3",) * 3
    assert table["learning rate"] == ("0.004", "0.002", "0.002")
    assert table["ranks"] == ("4", "4", "4")
    assert table["share of time blocked"] == ("15.0 %", "55.0 %", "40.0 %")
    assert table["inference latency, batch 64"] == ("4.2 ms", "13 ms", "9.24 ms")
    assert table["inference energy per sample, batch 1, modelled"][0] == "24 mJ"
    assert table["energy, measured"] == ("unavailable",) * 3


def test_ratios_stand_below_the_strategy_that_they_are_to():
    found = make_comparison(
        ratios=(
            Ratio("phantom", "tensor", "seconds", one_ratio(0.314, 0.28, 0.351)),
            Ratio("phantom", "megatron", "seconds", one_ratio(0.9, None, None)),
            Ratio("megatron", "tensor", "seconds", one_ratio(0.5, 0.4, 0.6)),
        )
    )
    section = tables.comparison_sections(found)[-1]
    assert section.headings[1:] == ("", "phantom / tensor", "phantom / megatron")
    table = rows(found)
    assert table["ratio: time to the loss"][1:] == ("0.31 [0.28, 0.35]", "0.90")
    assert table["ratio: modelled energy to the loss"][1:] == ("unavailable", "unavailable")


def test_what_missed_the_target_is_said_to_have_missed_it():
    found = make_comparison(missed=("tensor",))
    table = rows(found)
    assert table["reached the target"] == ("3 of 3", "0 of 3", "3 of 3")
    for label in ("steps to the loss", "time to the loss", "FLOPs to the loss", "modelled energy to the loss"):
        assert table[label][1] == "missed"
        assert table[label][0] != "missed"
    assert table["ratio: time to the loss"][1] == "missed"
    assert table["ratio: step time"][1] not in ("missed", "unavailable")
    assert table["step time"][1] not in ("missed", "unavailable")


def test_measured_energy_names_its_sensors():
    found = make_comparison()
    runs = tuple(replace(run, measured_joules=50.0, measured_by="counter, device") for run in found.runs)
    strategies = tuple(replace(one, measured_joules=Interval(50.0, 49.0, 51.0, 3)) for one in found.strategies)
    table = rows(replace(found, runs=runs, strategies=strategies))
    assert table["energy with evaluations, measured by counter, device"] == ("50 J",) * 3


def test_terminal_and_markdown_have_the_same_rows():
    found = make_comparison(("phantom", "tensor", "megatron", "dense"), missed=("tensor",))
    text, markdown = printed(tables.comparison_table(found)), tables.markdown(tables.comparison_sections(found))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    assert len({len(line) for line in lines}) == 1
    for section in tables.comparison_sections(found):
        for row in section.rows:
            assert [row.label, *row.cells] in lines
            assert row.label in text
            assert all(cell in text for cell in row.cells)


def test_markup_in_names_is_text():
    found = make_comparison(name="[bold]x[/bold]")
    assert "[bold]x[/bold]" in printed(tables.comparison_table(found))


def test_cells_of_several_seeds_are_one_row_with_the_median():
    section = study_tables.study_section(make_study("ghosts"))
    by_name = [dict(zip(section.headings, (row.label, *row.cells), strict=True)) for row in section.rows]
    assert len(by_name) == 7
    sixteen = next(row for row in by_name if row["ghosts"] == "16")
    assert sixteen["held-out loss"] == "0.051"  # 0.04 + 0.16 / 16 + 0.001, the second of three seeds
    assert sixteen["run"] == "here, 3 seeds"
    assert by_name[-1]["strategy"] == "tensor"
    assert by_name[-1]["ghosts"] == tables.NOTHING
    assert "width" not in section.headings
    assert study_tables.fixed_settings(make_study("ghosts").cells)["width"] == 512


def test_a_value_that_half_of_the_seeds_lack_is_missed():
    cells = [
        Cell(f"{seed}", {"strategy": "phantom", "seed": seed}, {"seconds": value, "reached": float(value is not None)})
        for seed, value in enumerate((4.0, None, None))
    ]
    (one,) = study_tables.group_cells(cells)
    assert one.values == {"seconds": None, "reached": 1.0}
    cells[1] = replace(cells[1], values={"seconds": 9.0, "reached": 1.0})
    (one,) = study_tables.group_cells(cells)
    assert one.values == {"seconds": 9.0, "reached": 2.0}
    never = [replace(cell, values={"seconds": None, "steps": 5.0, "reached": 0.0}) for cell in cells]
    assert rows_of_study(never)[0]["reached the target"] == "0 of 3"


def rows_of_study(cells):
    section = study_tables.study_section(make_study("ghosts", cells=tuple(cells)))
    return [dict(zip(section.headings, (row.label, *row.cells), strict=True)) for row in section.rows]


def test_modelled_cells_say_so():
    found = rows_of_study(make_study("scaling").cells)
    assert {row["run"] for row in found if int(row["ranks"]) > 8} == {"modelled"}
    assert {row["run"] for row in found if int(row["ranks"]) <= 8} == {"here"}
    assert next(row for row in found if row["ranks"] == "16")["share of time blocked"] == "unavailable"


def test_a_study_prints():
    for name in ("ghosts", "scaling", "smaller", "batch", "width", "mine"):
        assert "phantom" in printed(study_tables.study_table(make_study(name)))
    printed(study_tables.study_table(make_study("ghosts", cells=())))


def read(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_holds_every_number_to_the_last_digit():
    found = make_comparison(missed=("tensor",))
    files = {name: read(text) for name, text in csv_files(found).items()}
    assert sorted(files) == ["curve.csv", "ratios.csv", "runs.csv", "strategies.csv", "trials.csv"]
    for run, row in zip(found.runs, files["runs.csv"], strict=True):
        assert (row["strategy"], int(row["seed"]), float(row["seconds"])) == (run.strategy, run.seed, run.seconds)
        assert float(row["step_seconds"]) == run.step_seconds
        assert row["measured_joules"] == "unavailable"
    points = [(run.strategy, point) for run in found.runs for point in run.curve]
    for (strategy, point), row in zip(points, files["curve.csv"], strict=True):
        assert (row["strategy"], float(row["loss"]), float(row["joules"])) == (strategy, point.loss, point.joules)
    for one, row in zip(found.ratios, files["ratios.csv"], strict=True):
        assert (row["to"], row["measure"], float(row["ratio_mean"])) == (one.to, one.measure, one.ratio.mean)
    phantom, tensor, _ = files["strategies.csv"]
    assert float(phantom["seconds_low"]) == found.strategies[0].seconds.low
    assert float(phantom["inference_batch_64_latency_seconds"]) == pytest.approx(0.0042)
    assert tensor["seconds_mean"] == "missed"
    assert phantom["measured_joules_mean"] == tensor["measured_joules_mean"] == "unavailable"  # there are no sensors
    assert (phantom["error"], phantom["model"], files["runs.csv"][0]["trained_by"]) == ("", "", "")
    for trial, row in zip(found.trials, files["trials.csv"], strict=True):
        assert (row["strategy"], float(row["lr"]), row["status"]) == (trial.strategy, trial.lr, trial.status)
        assert row["loss"] == ("unavailable" if trial.loss is None else repr(trial.loss))
        assert row["chosen"] == str(trial.chosen)


def test_csv_of_a_missed_target_says_so_where_there_are_sensors():
    found = make_comparison(missed=("tensor",))
    runs = tuple(replace(run, measured_joules=50.0, measured_by="counter") for run in found.runs)
    _, tensor, _ = read(csv_files(replace(found, runs=runs))["strategies.csv"])
    assert tensor["measured_joules_mean"] == "missed"


def test_csv_has_no_bounds_that_cannot_be():
    """Of earlier results, whose symmetric intervals reach below 0 and above 1."""
    found = make_comparison()
    wide = Interval(0.5, -0.2, 1.2, 2)
    one = replace(found.strategies[0], step_seconds=wide, blocked_share=wide)
    (row,) = read(csv_files(replace(found, strategies=(one,)))["strategies.csv"])
    assert (row["step_seconds_low"], row["step_seconds_high"]) == ("0.0", "1.2")
    assert (row["blocked_share_low"], row["blocked_share_high"]) == ("0.0", "1.0")
    assert float(row["blocked_share_mean"]) == 0.5


def test_time_that_is_not_split_says_so():
    found = make_comparison()
    unsplit = replace(found.strategies[0], blocked_share=None)
    (row,) = read(csv_files(replace(found, strategies=(unsplit,)))["strategies.csv"])
    assert row["blocked_share_mean"] == "not split"


def test_csv_of_a_study_has_a_row_for_each_cell():
    found = make_study("scaling")
    table = read(csv_files(found)["cells.csv"])
    for cell, row in zip(found.cells, table, strict=True):
        assert int(row["setting_ranks"]) == cell.settings["ranks"]
        assert math.isclose(float(row["step_seconds"]), cell.values["step_seconds"], rel_tol=0)
        assert row["modelled"] == str(cell.modelled)
        assert (row["blocked_share"] == "unavailable") == cell.modelled
        assert (row["setting_ghosts"] == "") == (cell.settings["strategy"] != "phantom")  # they have none


def test_a_terminal_gets_the_main_measures_of_a_study_and_the_report_all():
    found = make_study("smaller")
    found = replace(found, cells=tuple(replace(one, values=one.values | {"memory_bytes": 8.0}) for one in found.cells))
    few, every = study_tables.study_section(found, brief=True), study_tables.study_section(found)
    assert set(few.headings) < set(every.headings)
    assert {"held-out loss", "reached the target"} <= set(few.headings)
    assert "memory per rank" in every.headings
    assert "memory per rank" not in few.headings
    assert len(few.rows) == len(every.rows)
    timed = study_tables.study_section(make_study("scaling"), brief=True).headings
    assert "step time" in timed


MANY = ("phantom", "phantom-copies", "tensor", "megatron", "copies", "tensor+int8")


def test_many_strategies_have_a_row_each_and_all_figures_in_the_details():
    found = make_comparison(MANY, missed=("copies",))
    (section,) = tables.comparison_sections(found)
    assert [row.label for row in section.rows] == list(MANY)
    columns = {row.label: dict(zip(section.headings[1:], row.cells, strict=True)) for row in section.rows}
    assert columns["phantom"]["time: phantom / it"] == tables.NOTHING
    assert columns["copies"]["time to the loss"] == columns["copies"]["time: phantom / it"] == "missed"
    assert columns["copies"]["ranks \N{MULTIPLICATION SIGN} copies"] == "1 \N{MULTIPLICATION SIGN} 4"
    mean = next(one.seconds.mean for one in found.strategies if one.strategy == "tensor")
    assert columns["tensor"]["time to the loss"] == quantity(mean, "s")
    ratio = next(one.ratio for one in found.ratios if (one.to, one.measure) == ("tensor", "joules"))
    assert columns["tensor"]["modelled energy: phantom / it"] == format_interval(ratio)
    detailed = tables.detailed_sections(found)
    assert detailed[0].headings == ("", *MANY)
    assert "phantom-copies" in printed(tables.comparison_table(found), width=80)


def test_measured_energy_of_many_strategies_has_a_column():
    found = make_comparison(MANY)
    runs = tuple(replace(run, measured_joules=50.0, measured_by="counter") for run in found.runs)
    strategies = tuple(replace(one, measured_joules=Interval(50.0, 49.0, 51.0, 3)) for one in found.strategies)
    ratio = Ratio("phantom", "tensor", "measured_joules", Interval(0.5, 0.4, 0.6, 3))
    (section,) = tables.comparison_sections(replace(found, runs=runs, strategies=strategies, ratios=(ratio,)))
    columns = {row.label: dict(zip(section.headings[1:], row.cells, strict=True)) for row in section.rows}
    assert columns["tensor"]["measured energy"] == "50 J"
    assert columns["tensor"]["measured energy: phantom / it"] == "0.50 [0.40, 0.60]"
    (section,) = tables.comparison_sections(found)
    assert not any("measured" in heading for heading in section.headings)


def test_a_strategy_with_an_error_says_so_and_has_not_missed():
    found = make_comparison(missed=("tensor",))
    phantom, tensor, megatron = found.strategies
    found = replace(found, strategies=(phantom, replace(tensor, error="its losses differ"), megatron))
    table = rows(found)
    assert table["time to the loss"][1] == table["ratio: time to the loss"][1] == "error"
    assert table["step time"][1] != "error"
    assert read(csv_files(found)["strategies.csv"])[1]["seconds_mean"] == "error"


def test_links_and_batches_are_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    time, energy, _ = study_tables.study_sections(make_regime())
    headings = ("strategy: time to the loss", "loopback, batch 64", "100mbit, batch 64", "100mbit, batch 512")
    assert time.headings == headings
    cells = {row.label: row.cells for row in time.rows}
    assert cells["phantom"] == ("2 s", "3 s", "8 s")
    assert cells["fsdp"] == ("5 s", "9 s", "missed")
    assert energy.rows[0].cells == ("20 J", "30 J", "80 J")
    one_link = study_tables.study_sections(make_regime((("100mbit", 64), ("100mbit", 512))))
    assert one_link[0].headings[1:] == ("batch 64", "batch 512")
    text = printed(study_tables.study_table(make_regime()))
    assert "modelled energy to the loss" in text


def test_a_study_to_a_loss_has_columns_at_the_end_and_to_the_loss():
    values = {"loss": 0.2, "end_steps": 300.0, "target": 0.3, "reached": 1.0, "steps": 200.0, "seconds": 2.0}
    settings = {"strategy": "phantom", "ranks": 2, "batch": 8}
    study = make_study(
        "wider", cells=(Cell("a", settings, values),), settings={"measure": "loss", "reference": {"strategy": "tensor"}}
    )
    section = study_tables.study_section(study)
    found = dict(zip(section.headings, (section.rows[0].label, *section.rows[0].cells), strict=True))
    assert found["held-out loss at the end"] == "0.2"
    assert found["steps at the end"] == "300"
    assert found["steps to the loss"] == "200"
    assert found["time to the loss"] == "2 s"
    assert "at the end of a training, which may be after different steps" in study_tables.note(study)


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"measure": "speed", "rounds": 3}, "Medians over 3 rounds. Modelled: frontier-mi250x."),
        ({"measure": "speed", "rounds": 1}, "Modelled: frontier-mi250x."),
    ],
)
def test_the_note_of_a_speed_study_is_about_rounds(settings, note):
    assert study_tables.note(make_study("scaling", settings=settings)) == note


def test_the_note_of_a_loss_study_says_that_medians_are_separate():
    note = study_tables.note(make_regime())
    assert note == "Medians over 3 seeds, each measure by itself: time is not exactly steps times step time."


def test_values_of_a_study_in_the_documentation_are_ratios_by_seed():
    data = json.loads((pages.RESULTS / "study-links.json").read_text())
    times = {
        (cell["settings"]["strategy"], cell["settings"]["seed"]): cell["values"]["seconds"]
        for cell in data["cells"]
        if cell["settings"]["link"] == "100mbit"
    }
    logs = [math.log(times["phantom", seed] / times["megatron", seed]) for seed in range(3)]
    mean = math.exp(sum(logs) / 3)
    shown = pages.value("study-links phantom/megatron seconds at 100mbit")
    assert shown.split()[0] == f"{mean:.2f}"
    assert pages.value("study-links phantom/megatron seconds mean at 100mbit") == f"{mean:.2f}"
    assert re.fullmatch(r"0\.\d\d \[0\.\d\d, 0\.\d\d\]", shown)
    with pytest.raises(ValueError, match="a place is missing"):
        pages.value("study-links phantom/megatron seconds")


@pytest.mark.parametrize("name", ["ghosts", "scaling", "smaller", "batch", "width"])
def test_a_terminal_of_80_characters_shows_every_digit_and_whole_words(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(study_tables.study_table(make_study(name)), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    words = set(text.split())
    section = study_tables.study_section(make_study(name), brief=True)
    for wanted in (*section.headings, *(cell for row in section.rows for cell in (row.label, *row.cells))):
        assert set(wanted.split()) <= words, wanted


def test_a_terminal_leaves_out_columns_of_settings_with_one_value_and_names_it_below(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    study = make_study("ghosts")
    assert "blocks" in study_tables.study_section(study).headings  # that tensor does not have
    assert "blocks" not in study_tables.study_section(study, brief=True).headings
    assert "blocks 4" in " ".join(printed(study_tables.study_table(study), width=80).split())
