"""The figure of a conversion, and its numbers beside it."""

import csv

from phantom_parallel.report.conversion_figures import draw_curve


def test_the_points_of_all_curves_are_in_a_csv_file(tmp_path):
    curves = {"phantom": [(0.8, 2.5), (0.5, 3.0)], "low rank": [(0.5, 3.25)]}
    written = draw_curve(curves, 2.25, tmp_path / "curve")
    assert sorted(path.name for path in written) == ["curve.csv", "curve.png", "curve.svg"]
    with (tmp_path / "curve.csv").open(newline="") as file:
        rows = [(row["method"], float(row["kept"]), float(row["loss"])) for row in csv.DictReader(file)]
    assert rows == [("dense", 1.0, 2.25), ("phantom", 0.5, 3.0), ("phantom", 0.8, 2.5), ("low rank", 0.5, 3.25)]
