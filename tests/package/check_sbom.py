"""Checks the SBOM in a wheel: it is valid CycloneDX, and true to the wheel's own metadata and files.

The session `package` of the noxfile runs it: `python tests/package/check_sbom.py WHEEL`.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterator
from email.parser import BytesParser
from hashlib import sha256
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

SBOM = "sboms/aiodelay.cdx.json"


def problems(wheel: zipfile.ZipFile) -> Iterator[str]:
    names = wheel.namelist()
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata.replace("METADATA", SBOM)).decode()
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        yield f"it is not valid CycloneDX 1.6: {error}"
    sbom = json.loads(text)
    told = BytesParser().parsebytes(wheel.read(metadata))
    own = sbom["metadata"]["component"]
    if (own["name"], own["version"]) != (told["Name"], told["Version"]):
        yield f"it describes {own['name']} {own['version']}"
    required = sum(len(each.get("properties", ())) for each in sbom["components"])
    wanted = sum(not line.startswith(f"{own['name']}[") for line in told.get_all("Requires-Dist", []))
    if required != wanted:
        yield f"it names {required} requirements, and the metadata have {wanted}"
    yield from wrong_hashes(wheel, sbom)


def wrong_hashes(wheel: zipfile.ZipFile, sbom: dict[str, Any]) -> Iterator[str]:
    """Yield a text for each vendored file that the SBOM does not have, or has with another hash."""
    files = [file for each in sbom["components"] for file in each.get("components", ())]
    hashes = {file["name"]: file["hashes"][0]["content"] for file in files}
    vendored = [name for name in wheel.namelist() if "/vendor/" in name and name.endswith(".js")]
    if {name.rpartition("/")[2] for name in vendored} != hashes.keys():
        yield f"it has the files {sorted(hashes)}, and the wheel has {vendored}"
    for name in vendored:
        if sha256(wheel.read(name)).hexdigest() != hashes.get(name.rpartition("/")[2]):
            yield f"its hash of {name} is wrong"


if __name__ == "__main__":
    with zipfile.ZipFile(sys.argv[1]) as opened:
        sys.exit("; ".join(problems(opened)) or 0)
