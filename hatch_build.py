"""The build hook that writes a software bill of materials (SBOM) into the wheel, as PEP 770 says: CycloneDX, as JSON.

The SBOM lists the scripts of others that the wheel contains, with their versions and hashes, and the packages that
aiodelay requires. The same sources always give the same SBOM: it has no time and no random number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "aiodelay.cdx.json"
VENDORED = "src/aiodelay/service/page/static/vendor"
HTMX_FILES = ("htmx.min.js", "hx-sse.min.js")


class SbomHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        self._folder = TemporaryDirectory()
        file = Path(self._folder.name, NAME)
        file.write_text(json.dumps(self._sbom(), indent=2) + "\n", encoding="utf-8")
        build_data["sbom_files"].append(f"{file}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        del build_data, artifact_path
        if version != "editable":
            self._folder.cleanup()

    def _sbom(self) -> dict[str, Any]:
        core = self.metadata.core
        own = {
            "type": "library",
            "bom-ref": core.name,
            "name": core.name,
            "version": self.metadata.version,
            "description": core.description,
            "licenses": [{"expression": core.license_expression}],
            "purl": f"pkg:pypi/{core.name}@{self.metadata.version}",
        }
        components = [
            _htmx(Path(self.root, VENDORED)),
            *_required(core.name, core.dependencies, core.optional_dependencies),
        ]
        return {
            "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {"component": own},
            "components": components,
            "dependencies": [{"ref": core.name, "dependsOn": [each["bom-ref"] for each in components]}],
        }


def _required(own: str, lines: Iterable[str], extras: Mapping[str, Iterable[str]]) -> Iterator[dict[str, Any]]:
    """Yield the components of the required packages. Their versions are open: the installer chooses them."""
    found: dict[str, dict[str, Any]] = {}
    for scope, given in [("required", lines), *(("optional", each) for each in extras.values())]:
        for line in given:
            name = canonicalize_name(Requirement(line).name)
            new: dict[str, Any] = {"type": "library", "bom-ref": f"pypi/{name}", "name": name, "scope": scope}
            new |= {"purl": f"pkg:pypi/{name}", "properties": []}
            found.setdefault(name, new)["properties"].append({"name": "requirement", "value": line})
    found.pop(own, None)  # an extra may name other extras
    return (found[name] for name in sorted(found))


def _htmx(folder: Path) -> dict[str, Any]:
    """Return the component of the scripts of htmx, which the wheel contains."""
    found = re.search(r'version="([^"]+)"', Path(folder, HTMX_FILES[0]).read_text(encoding="utf-8"))
    assert found is not None
    return {
        "type": "library",
        "bom-ref": "npm/htmx.org",
        "name": "htmx.org",
        "version": found[1],
        "scope": "required",
        "licenses": [{"license": {"id": "0BSD"}}],
        "purl": f"pkg:npm/htmx.org@{found[1]}",
        "components": [
            {
                "type": "file",
                "name": name,
                "hashes": [{"alg": "SHA-256", "content": sha256(Path(folder, name).read_bytes()).hexdigest()}],
            }
            for name in HTMX_FILES
        ],
    }
