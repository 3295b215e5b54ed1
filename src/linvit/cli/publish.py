"""`linvit publish`: a trained model on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from linvit.cli._output import print_json
from linvit.requests import PublishRequest


def run(request: PublishRequest) -> None:
    from linvit.training import hub

    if not request.dry_run:
        log = print if not (request.quiet or request.as_json) else (lambda text: None)
        known = {"private": request.private, "license": request.license, "page": request.page}
        url = hub.publish(request.model, request.name, **known, log=log)
        print_json({"name": request.name, "commit": url}) if request.as_json else print(url)
        return
    files = hub.contents(request.model, request.name, request.license, request.page)
    sizes = {name: x.stat().st_size if isinstance(x, Path) else len(x) for name, x in files.items()}
    if request.as_json:
        print_json({"name": request.name, "files": sizes})
        return
    for name, size in sizes.items():
        print(f"{request.name}/{name}: {size:,} bytes")
    if not request.quiet:
        print(f"\n{bytes(files['README.md']).decode()}")  # type: ignore[arg-type]
