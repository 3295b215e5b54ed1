"""`linvit export`: a trained model for use without linvit."""

from __future__ import annotations

from linvit.cli._output import print_json, working
from linvit.requests import ExportRequest


def run(request: ExportRequest) -> None:
    from linvit.conversion.export import export

    with working(request) as display:
        done = export(request.model, request.format, request.out, progress=display.progress)
    if request.as_json:
        names = ("batch", "low", "median", "high")
        ratios = [dict(zip(names, (batch, *quartiles), strict=True)) for batch, quartiles in done.speed.items()]
        found = {"path": str(done.path), "format": done.format, "use": done.note, "difference": done.difference}
        print_json(found | {"speed_vs_eager": ratios})
        return
    print(done.path)
    if request.quiet:
        return
    print(done.note)
    print(f"logits differ from the model's by at most {done.difference:.1e}")
    for batch, (low, middle, high) in done.speed.items():
        images = "one image" if batch == 1 else f"{batch} images"
        print(f"onnxruntime is {middle:.2f}× as fast as PyTorch [{low:.2f}, {high:.2f}] on {images}")
