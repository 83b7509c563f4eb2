"""Checks the container image: builds it, and runs `aiodelay demo` and `aiodelay serve` as a careful operator does.

The root file system is read-only, and the user is not root and has no capabilities. Needs Docker or Podman. The session
`image` of the noxfile runs it: `python tests/package/check_image.py [--tag TAG] [--python IMAGE]`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
HARDENED = ["--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
USER = "10001"
WAIT_S = 120
PAYLOAD = "hello from the image"
SETTINGS = """\
allowed_targets = ["stdout:greetings"]
sinks.stdout.url = "stdout:"

[api]
read_only = false

[[api.tokens]]
name = "check"
hash = "sha256:{hash}"
scopes = ["read", "schedule"]
"""
WRITE = 'cat > "$0" && chown 10001 "$0" && chmod 600 "$0"'
REQUEST = """
import sys, urllib.request
url, token, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, {"authorization": f"Bearer {token}"})
request.add_header("content-type", "application/json")
print(urllib.request.urlopen(request, timeout=10).read().decode())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", default="aiodelay:check")
    parser.add_argument("--python", help="the image with Python, instead of the one that the Containerfile names")
    given = parser.parse_args()
    engine = next((program for program in ("docker", "podman") if answers(program)), None)
    if engine is None:
        sys.exit("Neither Docker nor Podman answers. Start one of them.")
    base = [f"--build-arg=PYTHON={given.python}"] if given.python else []
    file = ROOT / "docs" / "deploy" / "Containerfile"
    run(engine, "build", *base, f"--file={file}", f"--tag={given.tag}", f"{ROOT}")
    run(engine, "run", "--rm", *HARDENED, given.tag, "demo", "--seconds", "5")
    serves(engine, given.tag)
    print(f"{given.tag}: demo and serve run with a read-only root, as user {USER}, without capabilities")


def answers(program: str) -> bool:
    """Return whether the engine is there. Docker's client alone is not enough."""
    return shutil.which(program) is not None and attempt(program, "info").returncode == 0


def serves(engine: str, tag: str) -> None:
    token = secrets.token_urlsafe(32)
    settings = SETTINGS.format(hash=hashlib.sha256(token.encode()).hexdigest())
    name = f"aiodelay-check-{secrets.token_hex(4)}"
    volume = f"--volume={name}:/etc/aiodelay"
    run(engine, "volume", "create", name)
    try:
        as_root = ["--interactive", "--user=0", "--entrypoint=sh"]
        run(engine, "run", "--rm", *as_root, volume, tag, "-c", WRITE, "/etc/aiodelay/aiodelay.toml", text=settings)
        run(engine, "run", "--detach", f"--name={name}", *HARDENED, f"{volume}:ro", tag)
        python = [engine, "exec", name, "python3", "-c"]
        ready = [*python, REQUEST, "http://127.0.0.1:8080/readyz", token, ""]
        wait_for(lambda: attempt(*ready).returncode == 0, lambda: run(engine, "logs", name))
        assert run(engine, "exec", name, "id", "-u").strip() == USER
        refused = attempt(*python, "open('/opt/aiodelay/x', 'w')").stdout
        assert "Read-only file system" in refused, refused
        message = json.dumps({"to": "stdout:greetings", "payload": PAYLOAD, "delay": "1s"})
        run(*python, REQUEST, "http://127.0.0.1:8080/v1/messages", token, message)
        wait_for(lambda: PAYLOAD in run(engine, "logs", name), lambda: run(engine, "logs", name))
        run(engine, "stop", "--time=60", name)
        code = run(engine, "inspect", "--format={{.State.ExitCode}}", name).strip()
        assert code == "0", f"after SIGTERM, the service ended with code {code}"
    finally:
        attempt(engine, "rm", "--force", "--volumes", name)
        attempt(engine, "volume", "rm", "--force", name)


def wait_for(condition: Callable[[], bool], log: Callable[[], str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"the service is not ready, or does not deliver, after {WAIT_S} s. Its log:\n{log()}")
        time.sleep(0.5)  # the service is another process, so poll


def run(*command: str, text: str = "") -> str:
    """Run the command, and return what it prints."""
    ended = attempt(*command, text=text)
    if ended.returncode != 0:
        sys.exit(f"{' '.join(command[:4])} ended with code {ended.returncode}:\n{ended.stdout}")
    return ended.stdout


def attempt(*command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


if __name__ == "__main__":
    main()
