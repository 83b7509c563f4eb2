"""The jobs of `aiodelay spark` under spark-submit: `spark-submit $(python -m pyspark_aiodelay) backfill …`.

Without a job it prints where it is. spark-submit runs a file, not a module, and puts the file's folder before all that
can be imported; beside this one there is nothing that could be taken for something else.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if sys.argv[1:]:
        from aiodelay.cli.app import run_app

        sys.exit(run_app(["spark", *sys.argv[1:]]))
    print(__file__)
