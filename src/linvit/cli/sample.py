"""`linvit sample`: images that a next-pixel model draws."""

from __future__ import annotations

from linvit.cli._output import working
from linvit.requests import SampleRequest


def run(request: SampleRequest) -> None:
    from linvit.devices import pick_device
    from linvit.models.sampling import draw_images
    from linvit.training.checkpoint import load

    if request.out.suffix.lower() != ".png":
        raise ValueError(f"--out {request.out} must end in .png")
    with working(request) as display:
        model = load(request.model).to(pick_device(request.device))
        draw_images(
            model,
            request.out,
            request.images,
            seed=request.seed,
            temperature=request.temperature,
            progress=display.progress,
        )
    if not request.quiet:
        print(f"{request.out}: {request.images} images of {model.config.attention}, seed {request.seed}")
