"""The jobs of `aiodelay spark` under spark-submit: `spark-submit $(python -m pyspark_aiodelay) backfill …`.

Without arguments, this program prints its own path, because spark-submit runs a file and not a module. spark-submit
also puts the folder of the file first in the import path. So no module in this folder may hide another module of the
same name.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    if sys.argv[1:]:
        from aiodelay.cli.app import run_app

        sys.exit(run_app(["spark", *sys.argv[1:]]))
    print(__file__)
