"""Builds the command of a Spark job from the dataclass of its options. `cli/spark/__init__.py` uses it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import datetime, timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from cyclopts import Parameter
from cyclopts.validators import Number

from aiodelay.cli.errors import FAILED, NOT_UNDERSTOOD, CommandError
from aiodelay.cli.output import print_json
from aiodelay.errors import ConfigurationError
from aiodelay.operations.json_shapes import read_time
from aiodelay.operations.spark_options import Flag

from .common import Cluster, mapping_of, run_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from aiodelay.spark.summary import Summary

__all__ = ["Source", "command"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Gives a job its input, from options that only the command line has. This base class has no options."""

    def run(self, job: Callable[..., Summary], spark: SparkSession, options: dict[str, Any]) -> Summary:
        """Run the job with its options, and return the summary."""
        return job(spark, **options)


def command(job: str, options: type, source: type[Source] = Source) -> Callable[..., int]:
    """Return the command of a job, with the options of the job, of the source and of `Cluster`."""
    own, of_job = _declared(source), _declared(options)
    declared = {name: own[name] for name in own if name not in of_job} | of_job | own

    def run(*, cluster: Cluster = Cluster(), **texts: Any) -> int:  # noqa: ANN401 - values from cyclopts
        def work(spark: SparkSession) -> Summary:
            columns = {"mapping": mapping_of(given["mapping"])} if "mapping" in given else {}
            return first.run(import_module(f"aiodelay.spark.jobs.{job}").run, spark, given | columns)

        given = {name: declared[name].read(value) for name, value in texts.items()}
        try:
            first = source(**{name: given.pop(name) for name in own if name in given})
            summary = run_job(work, cluster)
        except ConfigurationError as error:
            raise CommandError(f"{error}", exit_code=NOT_UNDERSTOOD) from error
        print_json(summary.shape())
        return 0 if summary.is_within(cluster.max_rejected) else FAILED

    where = inspect.Parameter("cluster", inspect.Parameter.KEYWORD_ONLY, default=Cluster(), annotation=Cluster)
    shown = [*(each.parameter for each in declared.values()), where]
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # cyclopts reads it
    run.__annotations__ = {each.name: each.annotation for each in shown}
    run.__doc__ = "\n".join([f"Run {job}.", "", "Args:", *_texts(source), *_texts(options)])
    return run


def _declared(options: type) -> dict[str, _Option]:
    """Return the options of a dataclass: first the options of the class itself, then the options of its bases."""
    own, hints = inspect.get_annotations(options), get_type_hints(options, include_extras=True)
    found = sorted(fields(options), key=lambda each: each.name not in own)
    return {each.name: _Option(each.name, each.default, hints[each.name]) for each in found}


class _Option(NamedTuple):
    name: str
    default: object
    hint: Any

    @property
    def parts(self) -> list[Any]:
        return list(_parts(self.hint))

    @property
    def flag(self) -> Flag:
        return next((each for each in self.parts if isinstance(each, Flag)), Flag())

    @property
    def spelled(self) -> str:
        return f"--{self.flag.name or self.name.strip('_').replace('_', '-')}"

    def read(self, value: Any) -> Any:  # noqa: ANN401 - of any type
        return read_time(value, self.spelled) if datetime in self.parts else value

    @property
    def parameter(self) -> inspect.Parameter:
        flag, is_mapping = self.flag, Mapping in self.parts
        spelled = Parameter(
            name=self.spelled,
            env_var=flag.env,
            negative=None if self.default is True else "",
            validator=[] if flag.least is None else Number(gte=flag.least, lte=flag.most),
            allow_leading_hyphen=flag.signed,
            consume_multiple=flag.many,
        )
        kind = tuple[str, ...] if is_mapping else self.hint
        if _TEXTS.intersection(self.parts):
            kind = str | None if self.default is None else str
        default = inspect.Parameter.empty if self.default is MISSING else () if is_mapping else self.default
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, spelled]
        )


_TEXTS = frozenset({datetime, timedelta})
"""Types of options that arrive as text from the command line."""


def _parts(hint: Any) -> Iterator[Any]:  # noqa: ANN401 - any type
    """Yield a type and all types and annotations inside it."""
    yield get_origin(hint) or hint
    for each in get_args(hint):
        yield from _parts(each)


def _texts(options: type) -> Iterator[str]:
    """Return the help texts of the options: the attribute sections in the docstrings of a dataclass and its bases.

    Each help text is on one line.
    """
    texts = (f"{inspect.getdoc(each)}".partition("Attributes:\n")[2] for each in options.__mro__)
    return (text.replace("\n        ", " ") for text in texts)  # help would keep the line breaks
