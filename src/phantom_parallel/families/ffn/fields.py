"""Solution operators of elliptic equations as data: coefficient or source fields in, solutions out.

``darcy``       -div(a grad u) = 1 on a grid, where a is 3 or 12 by the sign of a Gaussian random field
``darcy-mesh``  the same on an unstructured mesh: jittered points, Delaunay triangles, linear elements
``poisson``     -div(grad u) = f on a grid, where f is a Gaussian random field; u is linear in f

All are on the unit square with u = 0 on its boundary, and solved in float64. A feature is a grid point or a vertex. The
order of the features decides what a block of them is. In the order ``tiles``, consecutive features are neighbours in
space, so that a block is a region. Green's functions are smooth between separate regions, that is of low rank, which is
the structure of a phantom layer; ``rows`` (by coordinates) and ``random`` give up some or all of it.

Inputs are scaled to mean 0 and variance 1, targets by the mean of each feature and one standard deviation for all of
them. The mean squared error is then relative to the variance of the solutions: 1 is the error of the mean field.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import scipy.sparse as sp
from filelock import FileLock
from scipy.fft import idctn
from scipy.ndimage import map_coordinates
from scipy.sparse.linalg import factorized, spsolve
from scipy.spatial import Delaunay

from phantom_parallel.utils.files import atomic_file, cache_folder
from phantom_parallel.utils.progress import ProgressDisplay

FeatureOrder = Literal["tiles", "rows", "random"]
FIELDS = {"darcy": "coefficient", "darcy-mesh": "coefficient", "poisson": "source"}  # with the name of their inputs
COEFFICIENTS = (3.0, 12.0)  # of Darcy flow
_FORMAT = 1  # of cached files, to be increased when what is computed changes
_COARSE = 64  # points along a side of the Gaussian fields that coefficients on a mesh are interpolated from
_JITTER = 0.4  # largest displacement of a vertex, in spacings of the grid
_SOLVED = 64  # fields between updates of the progress

# A Gaussian field -> input and solution, (features,) each
Solver = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Fields:
    """Inputs and solutions of an equation, with their features in one order."""

    x: np.ndarray  # scaled inputs, (rows, features), float32
    y: np.ndarray  # scaled solutions, (rows, features), float32
    mean: np.ndarray  # mean solution, (features,)
    scale: float  # standard deviation of the solutions, which are ``mean + scale * y``
    points: np.ndarray  # coordinates of the features in the unit square, (features, 2)


@lru_cache(maxsize=1)  # comparisons train several models on the same data
def load_fields(
    name: str, grid: int, rows: int, seed: int = 0, order: FeatureOrder = "tiles", show: bool = False
) -> Fields:
    """Load ``rows`` fields of ``grid ** 2`` features from the user's cache folder, where they are stored when they are
    first computed, with progress on stderr if ``show``. The first rows do not depend on their number.
    """
    path = cache_folder() / "fields" / f"{name}-{grid}-{rows}-{seed}-v{_FORMAT}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), mode=0o600):  # other ranks wait for the one that computes
        if not path.exists():
            _compute(path, name, grid, rows, seed, show)
    with np.load(path, allow_pickle=False) as stored:
        x, y, points = stored["x"], stored["y"], stored["points"]
    mean = y.mean(0)
    scale = float((y - mean).std())
    places = order_points(points, order)
    return Fields(
        x=((x - x.mean()) / x.std())[:, places].astype(np.float32),
        y=((y - mean) / scale)[:, places].astype(np.float32),
        mean=mean[places],
        scale=scale,
        points=points[places],
    )


def order_points(points: np.ndarray, order: FeatureOrder) -> np.ndarray:
    """Return the indices of points in the unit square, (points, 2), in an order of features."""
    if order == "rows":
        return np.lexsort((points[:, 1], points[:, 0]))
    if order == "random":
        return np.random.default_rng(0).permutation(len(points))
    return _bisect(points, np.arange(len(points)))


def _bisect(points: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Halve the points along their longer side, again and again: any 2^n equal blocks of the result are regions."""
    if len(indices) < 2:
        return indices
    axis = np.ptp(points[indices], axis=0).round(9).argmax()
    ordered = indices[np.argsort(points[indices, axis], kind="stable")]
    half = len(ordered) // 2
    return np.concatenate([_bisect(points, ordered[:half]), _bisect(points, ordered[half:])])


def _compute(path: Path, name: str, grid: int, rows: int, seed: int, show: bool) -> None:
    """Solve the equation for every row, and write inputs, solutions and points."""
    solver: Solver
    if name == "darcy-mesh":
        mesh = Mesh(grid)
        points, side, solver = mesh.points, _COARSE, mesh.solve
    else:
        steps = np.arange(1, grid + 1) / (grid + 1)
        points = np.stack(np.meshgrid(steps, steps, indexing="ij"), -1).reshape(-1, 2)
        side, solver = grid, solve_darcy if name == "darcy" else poisson_solver(grid)
    x, y = (np.empty((rows, grid * grid)) for _ in range(2))
    with ProgressDisplay(show=show) as display:
        display.stage(f"solving {name}", total=rows)
        for row, field in enumerate(gaussian_fields(side, rows, seed)):
            x[row], y[row] = solver(field)
            if row % _SOLVED == 0:
                display.update(row + 1, f"{row + 1:,} of {rows:,} fields")
    with atomic_file(path) as file:
        np.savez(file, x=x.astype(np.float32), y=y, points=points)


def gaussian_fields(side: int, rows: int, seed: int, alpha: float = 2.0, tau: float = 3.0) -> Iterator[np.ndarray]:
    """Draw Gaussian random fields, (side, side), with the covariance (-laplace + tau^2)^-alpha, Neumann boundaries and
    mean 0.
    """
    wave = np.arange(side)
    squares = wave[:, None] ** 2 + wave[None, :] ** 2
    amplitude = side * tau ** (alpha - 1) * (np.pi**2 * squares + tau**2) ** (-alpha / 2)
    amplitude[0, 0] = 0.0
    for row in range(rows):
        noise = np.random.default_rng([seed, row]).standard_normal((side, side))
        yield idctn(amplitude * noise, norm="ortho")


def solve_darcy(field: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithm of the coefficient and the pressure, on the grid of ``field``."""
    a = np.where(field > 0, COEFFICIENTS[1], COEFFICIENTS[0])
    return np.log(a).ravel(), spsolve(five_point(a), np.ones(a.size))


def poisson_solver(grid: int) -> Solver:
    """Return the solver for sources on a grid; its matrix is factorized once."""
    solve = factorized(five_point(np.ones((grid, grid))))
    return lambda field: (field.ravel(), solve(field.ravel()))


def five_point(a: np.ndarray) -> sp.csc_matrix:
    """Return the matrix of -div(a grad u) by finite volumes on the inner points of a grid, with the harmonic mean of a
    between neighbours and u = 0 on the boundary.
    """
    side, padded = len(a), np.pad(a, 1, mode="edge")
    pairs = (padded[:-1, 1:-1], padded[1:, 1:-1]), (padded[1:-1, :-1], padded[1:-1, 1:])
    down, right = (2 * near * far / (near + far) for near, far in pairs)  # (side + 1, side) and (side, side + 1)
    diagonal = down[:-1] + down[1:] + right[:, :-1] + right[:, 1:]
    right[:, -1] = 0  # points at the ends of two rows are no neighbours
    below, beside = -down[1:-1].ravel(), -right[:, 1:].ravel()[:-1]
    bands = [below, beside, diagonal.ravel(), beside, below]
    return sp.diags(bands, [-side, -1, 0, 1, side], format="csc") * (side + 1) ** 2


class Mesh:
    """A Delaunay mesh of jittered points with linear elements for Darcy flow; u = 0 at the vertices on the boundary.
    ``grid`` is the number of inner vertices along a side.
    """

    def __init__(self, grid: int) -> None:
        steps = np.arange(1, grid + 1)
        regular = np.stack(np.meshgrid(steps, steps, indexing="ij"), -1).reshape(-1, 2)
        self.points = (regular + np.random.default_rng(0).uniform(-_JITTER, _JITTER, regular.shape)) / (grid + 1)
        side = np.linspace(0, 1, grid + 2)
        edges = [np.stack(pair, 1) for value in (0 * side, 0 * side + 1) for pair in ((side, value), (value, side))]
        vertices = np.concatenate([self.points, np.unique(np.concatenate(edges), axis=0)])
        triangles = Delaunay(vertices).simplices  # (triangles, 3)
        corners = vertices[triangles]  # (triangles, 3, 2)
        opposite = corners[:, [2, 0, 1]] - corners[:, [1, 2, 0]]  # the side opposite to each corner
        area = 0.5 * np.abs(opposite[:, 0, 0] * opposite[:, 1, 1] - opposite[:, 0, 1] * opposite[:, 1, 0])
        inner = len(self.points)
        rows, columns = np.repeat(triangles, 3, 1).ravel(), np.tile(triangles, (1, 3)).ravel()
        self._inner = (rows < inner) & (columns < inner)
        self._places = rows[self._inner], columns[self._inner]
        self._stiffness = np.einsum("tid,tjd->tij", opposite, opposite) / (4 * area)[:, None, None]
        self._centres = corners.mean(1)
        self._load = np.bincount(triangles.ravel(), np.repeat(area / 3, 3))[:inner]  # of the source 1

    def solve(self, field: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the logarithm of the coefficient at the vertices and the pressure. ``field`` is on a grid over the
        square; the coefficient is constant on a triangle.
        """
        on_triangles, on_vertices = (
            np.where(map_coordinates(field, (places * (len(field) - 1)).T, order=1) > 0, *COEFFICIENTS[::-1])
            for places in (self._centres, self.points)
        )
        entries = (self._stiffness * on_triangles[:, None, None]).ravel()[self._inner]
        matrix = sp.csc_matrix((entries, self._places), shape=(len(self.points),) * 2)
        return np.log(on_vertices), spsolve(matrix, self._load)
