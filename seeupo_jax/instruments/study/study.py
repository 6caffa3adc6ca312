"""A study: recipes tuned alike, then trained with fresh seeds; defined by a file's `get_study()`.

Its cells are training runs, in stages: `tuning`, `final`, `ablation` and `stability`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seeupo_jax.comparison.runs import check_evaluated
from seeupo_jax.configuration.config_file import find_config, read_values
from seeupo_jax.configuration.loading import load_config, to_dict
from seeupo_jax.configuration.schema import Config
from seeupo_jax.configuration.user_code import shortened, shown, text_of
from seeupo_jax.metrics.run_manifest import flatten
from seeupo_jax.trajectories.json_lines import plain

STAGES = ("tuning", "final", "ablation", "stability")
# Groups of the configuration that change no result and are not part of a cell's identity.
_NO_RESULT = ("checkpoint", "profile", "telemetry", "log_checksum")

Point = dict[str, Any]  # fields of the configuration and their values


@dataclass(frozen=True)
class Axis:
    """One axis of a grid: values of a field, or of several fields together."""

    fields: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]

    @property
    def label(self) -> str:
        """The names of its fields without their groups."""
        return ", ".join(field.rpartition(".")[2] for field in self.fields)

    def value_of(self, point: Mapping[str, Any]) -> str:
        """A point's value on this axis."""
        return ", ".join(text_of(point[field]) for field in self.fields)

    def points(self) -> list[Point]:
        return [dict(zip(self.fields, values, strict=True)) for values in self.values]


Grid = tuple[Axis, ...]


def grid_points(grid: Grid) -> list[Point]:
    """Every combination, the last axis varying fastest."""
    combined = itertools.product(*(axis.points() for axis in grid))
    return [{k: v for part in parts for k, v in part.items()} for parts in combined]


def point_text(point: Mapping[str, Any]) -> str:
    """A point in words: names without their groups."""
    return " ".join(f"{key.rpartition('.')[2]}={text_of(value)}" for key, value in point.items())


@dataclass(frozen=True)
class RecipeAblation:
    """A recipe with the point that it was tuned to and some fields changed."""

    recipe: str
    changes: Point


@dataclass(frozen=True)
class Study:
    """A study as a file's `get_study()` describes it.

    reference: the recipe that the others are compared with.
    choose_by: `area` under the success of the rollouts, or success after the last iteration
      (`final`); the point with the largest mean over the tuning seeds is chosen.
    tuning: the grid of each recipe. seeds: of the final runs.
    exploring: fields of the runs of the tuning and of the stability map.
    """

    config_file: Path
    overrides: tuple[str, ...]
    recipes: dict[str, Point]
    reference: str
    choose_by: str
    tuning: dict[str, Grid]
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    ablations: dict[str, RecipeAblation]
    stability: dict[str, Grid]
    stability_seeds: tuple[int, ...]
    exploring: Point

    @functools.cached_property
    def _load(self) -> Callable[[tuple[str, ...]], Config]:
        """Loads by overrides, once each: a study lists its cells often, and a load takes 5 ms."""
        return functools.cache(functools.partial(load_config, self.config_file))

    def cells(self, stage: str, tuned: Mapping[str, Point]) -> list[Cell]:
        """The runs of a stage, in the order in which they are trained.

        Args:
          tuned: the chosen points; runs that depend on a missing one are left out.
        """
        return {
            "tuning": lambda _: self._tuning_cells,
            "final": self._final_cells,
            "ablation": self._ablation_cells,
            "stability": self._stability_cells,
        }[stage](tuned)

    @functools.cached_property
    def _tuning_cells(self) -> list[Cell]:
        return [
            self._cell("tuning", name, point, seed, self.recipes[name], self.exploring)
            for name, grid in self.tuning.items()
            for point in grid_points(grid)
            for seed in self.tuning_seeds
        ]

    def _final_cells(self, tuned: Mapping[str, Point]) -> list[Cell]:
        return [
            self._cell("final", name, tuned[name], seed, self.recipes[name], {})
            for seed in self.seeds
            for name in self.recipes
            if name in tuned
        ]

    def _ablation_cells(self, tuned: Mapping[str, Point]) -> list[Cell]:
        return [
            self._cell(
                "ablation", name, point | ablation.changes, seed, self.recipes[ablation.recipe], {}
            )
            for seed in self.seeds
            for name, ablation in self.ablations.items()
            if (point := tuned.get(ablation.recipe)) is not None
        ]

    def _stability_cells(self, tuned: Mapping[str, Point]) -> list[Cell]:
        return [
            self._cell(
                "stability", name, tuned[name] | point, seed, self.recipes[name], self.exploring
            )
            for name, grid in self.stability.items()
            if name in tuned
            for point in grid_points(grid)
            for seed in self.stability_seeds
        ]

    def _cell(
        self, stage: str, variant: str, point: Point, seed: int, recipe: Point, more: Point
    ) -> Cell:
        split = (text.partition("=") for text in self.overrides)
        fields = {key: value for key, _, value in split}
        fields |= {key: text_of(value) for key, value in {**more, **recipe, **point}.items()}
        texts = [f"{key}={value}" for key, value in fields.items()]
        config = self._load((*texts, f"seed={seed}"))
        if config.stop_after_idle is not None:
            raise ValueError(
                f"config.stop_after_idle: got {config.stop_after_idle}; allowed in a study: none,"
                " since a run that collapses is trained to its end too."
            )
        check_evaluated(config)
        return Cell(stage, variant, point, seed, config)


@dataclass(frozen=True)
class Cell:
    """One run of a study. variant: a recipe or an ablation. point: its place in the grid."""

    stage: str
    variant: str
    point: Point
    seed: int
    config: Config

    def __str__(self) -> str:
        return " ".join(filter(None, (self.stage, self.name)))

    @property
    def name(self) -> str:
        """Its difference from the other cells of its stage, in words."""
        return " ".join(filter(None, (self.variant, point_text(self.point), f"seed {self.seed}")))

    @property
    def metric(self) -> str:
        return f"eval/avg@{self.config.evaluation.k}"

    def definition(self) -> dict[str, Any]:
        """All that its result depends on: the fields that differ from their defaults."""
        default = dict(flatten(plain(to_dict(Config()))))
        return {
            field: value
            for field, value in flatten(plain(to_dict(self.config)))
            if (field not in default or default[field] != value)
            and field.partition(".")[0] not in _NO_RESULT
        }

    @functools.cached_property
    def key(self) -> str:
        """A hash of the definition; a new field of the configuration does not change it."""
        text = json.dumps(self.definition(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_study(config: str, overrides: Sequence[str]) -> Study:
    """The study of a file, with every configuration of it loaded once.

    Raises:
      ValueError: a file without one, or one that cannot run; one sentence.
    """
    file = find_config(config).absolute()
    values = read_values(file, "get_study")
    fields = ("recipes", "reference", "choose_by", "tuning", "seeds", "ablations", "stability")
    _check_names(values, "study", (*fields, "exploring"), required=("recipes", "tuning", "seeds"))
    named = _map(values.get("recipes", {}), "recipes")
    recipes = {name: _point(point, f"recipes.{name}") for name, point in named.items()}
    if not recipes:
        raise ValueError("study.recipes: got none; allowed: at least one name with its fields.")
    tuning, tuning_seeds = _grids(values, "tuning", recipes)
    stability, stability_seeds = {}, ()
    if "stability" in values:
        stability, stability_seeds = _grids(values, "stability", recipes)
    study = Study(
        config_file=file,
        overrides=tuple(overrides),
        recipes=recipes,
        reference=_one_of(values, "reference", tuple(recipes)),
        choose_by=_one_of(values, "choose_by", ("area", "final")),
        tuning=tuning,
        tuning_seeds=tuning_seeds,
        seeds=_seeds(values, "seeds"),
        ablations=_ablations(values, recipes),
        stability=stability,
        stability_seeds=stability_seeds,
        exploring=_point(values.get("exploring", {}), "exploring"),
    )
    _check_overrides(study)
    _check_alike(study)
    first = {name: grid_points(grid)[0] for name, grid in study.tuning.items()}
    for stage in STAGES:
        study.cells(stage, first)
    return study


def _check_overrides(study: Study) -> None:
    """Checks that no override changes a field that the study sets itself."""
    for text in study.overrides:
        given, _, value = text.partition("=")
        if given in ("seed", "recipe"):
            raise ValueError(f"--config.{text}: a study says the recipes and seeds of its runs.")
        for place, field in _fields_set(study):
            # A group and a field of it are not independent either.
            if f"{given}.".startswith(f"{field}.") or f"{field}.".startswith(f"{given}."):
                raise ValueError(
                    f"--config.{given}: got {shortened(value)}; allowed: none with this study,"
                    f" since {place} sets {field}."
                )


def _fields_set(study: Study) -> Iterator[tuple[str, str]]:
    """Where a study sets fields, and which."""
    points = {f"study.recipes.{name}": fields for name, fields in study.recipes.items()}
    points["study.exploring"] = study.exploring
    points |= {
        f"study.ablations.{name}": fields.changes for name, fields in study.ablations.items()
    }
    for place, point in points.items():
        yield from ((place, field) for field in point)
    for stage, grids in (("tuning", study.tuning), ("stability", study.stability)):
        for name, grid in grids.items():
            place = f"the grid of {name} in study.{stage}"
            yield from ((place, field) for axis in grid for field in axis.fields)


def _check_alike(study: Study) -> None:
    """Whether all recipes are tuned with one budget, on seeds that no final run has."""
    counts = {name: len(grid_points(grid)) for name, grid in study.tuning.items()}
    for name, count in counts.items():
        if count != counts[study.reference]:
            raise ValueError(
                f"study.tuning.grids.{name}: got {count} points; allowed: as many as"
                f" {study.reference} has, {counts[study.reference]}: one budget for all."
            )
    if both := set(study.seeds) & {*study.tuning_seeds, *study.stability_seeds}:
        raise ValueError(
            f"study.seeds: got {min(both)}, which tuning or stability has too; allowed: fresh ones."
        )
    if any(len(grid) != 2 for grid in study.stability.values()):
        raise ValueError("study.stability: got a grid of other than two axes; allowed: two.")
    firsts = {name: ", ".join(grid[0].fields) for name, grid in study.stability.items()}
    for name, first in firsts.items():
        if first != firsts[study.reference]:
            raise ValueError(
                f"study.stability: got {first} as the first axis of {name}; allowed:"
                f" {firsts[study.reference]}, as of {study.reference}: the map has one for all."
            )


def _check_names(
    values: Mapping[str, Any], name: str, allowed: Sequence[str], required: Sequence[str] = ()
) -> None:
    for key in values:
        if key not in allowed:
            raise ValueError(f"{name}.{key}: no such field; allowed: {', '.join(allowed)}.")
    for key in required:
        if key not in values:
            raise ValueError(f"{name}.{key}: got none; allowed: see configs/study_order_desk.py.")


def _map(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"study.{name}: got {shown(value)}; allowed: a dict whose keys are names.")
    return value


def _one_of(values: Mapping[str, Any], name: str, allowed: Sequence[str]) -> str:
    value = values.get(name, allowed[0])
    if value not in allowed:
        raise ValueError(f"study.{name}: got {shown(value)}; allowed: {', '.join(allowed)}.")
    return value


def _point(value: Any, name: str) -> Point:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(
            f"study.{name}: got {shown(value)}; allowed: a dict of fields, as"
            " {'optimizer.learning_rate': 1e-4}."
        )
    return dict(value)


def _seeds(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    seeds = values.get("seeds", ())
    integers = isinstance(seeds, list | tuple | range) and all(type(s) is int for s in seeds)
    if not integers or not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"study.{name}: got {shown(seeds)}; allowed: whole numbers, each once.")
    return tuple(seeds)


def _grids(
    values: Mapping[str, Any], name: str, recipes: Mapping[str, Point]
) -> tuple[dict[str, Grid], tuple[int, ...]]:
    """The grid of each recipe, its own or the common one, and the seeds."""
    given = _map(values.get(name, {}), name)
    _check_names(given, f"study.{name}", ("seeds", "grid", "grids"), required=("seeds", "grid"))
    by_recipe = _map(given.get("grids", {}), f"{name}.grids")
    _check_names(by_recipe, f"study.{name}.grids", tuple(recipes))
    grids = {
        recipe: _grid(by_recipe.get(recipe, given["grid"]), f"study.{name}: the grid of {recipe}")
        for recipe in recipes
    }
    return grids, _seeds(given, f"{name}.seeds")


def _grid(value: Any, name: str) -> Grid:
    allowed = (
        "allowed: a dict of fields and their values, as {'optimizer.learning_rate': (1e-4, 2e-4)},"
        " or of several fields together, as {('algorithm.clip_low', 'algorithm.clip_high'):"
        " ((0.2, 0.2),)}."
    )
    axes = []
    for fields, values in value.items() if isinstance(value, Mapping) else ():
        joint = isinstance(fields, tuple)
        names = fields if joint else (fields,)
        listed = list(values) if isinstance(values, list | tuple | range) else []
        rows = tuple(listed if joint else ((each,) for each in listed))
        fit = all(isinstance(row, list | tuple) and len(row) == len(names) for row in rows)
        if not rows or not fit or len({*map(repr, rows)}) < len(rows):
            raise ValueError(f"{name}: got {shown(values)} for {shown(fields)}; {allowed}")
        axes.append(Axis(names, tuple(map(tuple, rows))))
    if not axes:
        raise ValueError(f"{name}: got {shown(value)}; {allowed}")
    return tuple(axes)


def _ablations(
    values: Mapping[str, Any], recipes: Mapping[str, Point]
) -> dict[str, RecipeAblation]:
    ablations = {}
    for name, ablation in _map(values.get("ablations", {}), "ablations").items():
        changes = _point(ablation, f"ablations.{name}")
        recipe = changes.pop("of", None)
        if not isinstance(recipe, str) or recipe not in recipes or name in recipes:
            raise ValueError(
                f"study.ablations.{name}.of: got {shown(recipe)}; allowed: one of"
                f" {', '.join(recipes)}, and for the ablation a name of its own."
            )
        ablations[name] = RecipeAblation(recipe, changes)
    return ablations
