"""`linvit predict`: what is on these images?"""

from __future__ import annotations

import sys

from linvit.cli._output import print_json, print_table, working
from linvit.requests import PredictRequest


def run(request: PredictRequest) -> None:
    from linvit.data.folder import find_images
    from linvit.devices import pick_device
    from linvit.training.checkpoint import load
    from linvit.training.predict import predict

    paths = find_images(request.images)
    skipped: list[str] = []
    on_bad = (lambda error: skipped.append(str(error))) if request.skip_bad else None
    with working(request) as display:
        model = load(request.model).to(pick_device(request.device))
        found = list(predict(model, paths, top=request.top, skip=on_bad, progress=display.progress))
    for message in skipped:
        print(f"linvit: skipped: {message}", file=sys.stderr)
    if request.as_json:
        print_json(
            [
                {"image": one.image, "top": [{"class": name, "probability": value} for name, value in one.top]}
                for one in found
            ]
        )
        return
    print_table(
        [
            {"image": one.image} | {f"{i}.": f"{name} {value:.1%}" for i, (name, value) in enumerate(one.top, 1)}
            for one in found
        ]
    )
