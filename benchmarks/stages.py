"""Effect of each stage of a conversion, compared with training from scratch for as many steps.

    python benchmarks/stages.py cifar10       # an hour and a half of one core; the same call resumes
    python benchmarks/stages.py mnist         # half an hour

A softmax transformer of plain patches is trained; with several seeds it is made linear in all layers, in stages that
take no more than a tenth of its steps, and as many steps are spent on the same linear model from scratch. Then layers
are made linear as far as `--max-drop 1%` allows, without training and with it. Writes stages-DATA.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from linvit.conversion.run import Converted
from linvit.durations import duration
from linvit.files import slug, write_atomically
from linvit.measure.provenance import cpu_name
from linvit.pipeline.convert import convert
from linvit.pipeline.train import Trained, train
from linvit.records import commit

TEACHERS = {
    "cifar10": {"size": "tiny", "attention": "softmax:dwc=3", "epochs": 10.0},
    "mnist": {"size": "tiny", "patch_size": 4, "attention": "softmax", "epochs": 3.0},
}
STUDENTS = {"cifar10": "performer-theta:m=32,dwc=3", "mnist": "performer-relu:m=32,dwc=3"}
SEARCHED = {"cifar10": "performer-theta:dwc=3", "mnist": "performer-theta"}  # the number of features is chosen by layer
TENTH, ALLOWED = 0.1, 0.01


@dataclass(frozen=True)
class Found:
    data: str
    to: str
    teacher: Trained
    students: Sequence[Converted]
    scratch: Sequence[Trained]
    mixes: Sequence[tuple[str, Converted]]  # which stages there were

    @property
    def length(self) -> int:
        """Steps of the teacher."""
        return self.teacher.experiment.length(len(self.teacher.data.train)).total


def accuracy(trained: Trained) -> float:
    record = trained.find("test_accuracy", "best")
    return float(record.value or 0) if record else 0.0


def steps(done: Converted) -> int:
    return sum(stage.steps for stage in done.stages)


def found(options: argparse.Namespace) -> Iterator[Found]:
    """All that is there, as it becomes more."""
    data, work = options.data, options.work / options.data
    to, root = options.to or STUDENTS[data], {"data_root": options.data_root}
    teacher = train(data, out=work / "teacher", **TEACHERS[data], **root)  # type: ignore[arg-type]
    length = teacher.experiment.length(len(teacher.data.train)).total
    few = options.steps or int(TENTH * length) // 4 * 4  # in quarters
    students, scratch = [], []
    for seed in range(options.seeds):
        students.append(
            convert(
                work / "teacher",
                to=to,
                data=data,
                steps=few,
                stages=options.stages,
                seed=seed,
                report=seed == 0,
                out=work / f"{slug(to)}-{seed}",
                **root,
            )
        )
        same = {key: value for key, value in TEACHERS[data].items() if key not in ("attention", "epochs")}
        scratch.append(
            train(
                data,
                attention=to,
                seed=seed,
                steps=steps(students[-1]),
                out=work / f"{slug(to)}-scratch-{seed}",
                **same,
                **root,
            )
        )  # type: ignore[arg-type]
        print(f"seed {seed}: {students[-1].test_accuracy():.2%}, from scratch {accuracy(scratch[-1]):.2%}", flush=True)
        yield Found(data, to, teacher, students, scratch, [])
    mixes = []
    for text, stages in (("none", ()), ("1, 2", (1, 2))):
        mixes.append(
            (
                text,
                convert(
                    work / "teacher",
                    to=SEARCHED[data],
                    data=data,
                    steps=few if stages else None,
                    stages=stages,
                    max_drop=ALLOWED,
                    out=work / f"drop-{slug(text)}",
                    **root,
                ),
            )
        )
        yield Found(data, to, teacher, students, scratch, mixes)


def page(one: Found) -> str:
    teacher, students, model = accuracy(one.teacher), one.students, one.teacher.experiment.model
    taken, seeds = steps(students[0]), range(len(students))
    tested = {
        "converted": [done.test_accuracy() for done in students],
        "from scratch, as many steps": [accuracy(run) for run in one.scratch],
    }
    lines = [
        f"# Effect of each conversion stage: {one.data}",
        "",
        f"Made by `python benchmarks/stages.py {one.data}`, commit {commit()}, {cpu_name()}, {torch.get_num_threads()} "
        f"thread, float32, PyTorch {torch.__version__}. The teacher, `{model.attention}` behind patches of "
        f"{model.patch_size} pixels, took {one.length:,} steps and has an accuracy of {teacher:.2%} on "
        f"{len(one.teacher.data.test):,} test images.",
        "",
        f"All layers become `{one.to}`, {len(students)} seeds; {taken:,} steps in all stages together are "
        f"{taken / one.length:.1%} of the teacher's.",
        "",
        "| validation, mean over seeds | accuracy | agreement with the teacher | steps | time of one run |",
        "|---|---|---|---|---|",
        *(
            f"| {rows[0].name} | {fmean(r.accuracy for r in rows):.2%} | {fmean(r.agreement for r in rows):.2%} "
            f"| {rows[0].steps:,} | {duration(fmean(r.seconds for r in rows))} |"
            for rows in zip(*(done.stages for done in students), strict=True)
        ),
        "",
        f"| test | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | of the teacher's accuracy |",
        "|---|" + "---|" * (len(seeds) + 2),
        *(
            f"| {name} | {' | '.join(f'{value:.2%}' for value in values)} | {fmean(values):.2%} "
            f"| {fmean(values) / teacher:.1%} |"
            for name, values in tested.items()
        ),
        "",
    ]
    if one.mixes:
        lines += [
            f"With `--max-drop {ALLOWED:.0%}`, to `{SEARCHED[one.data]}`, features chosen per layer (at most 4 × "
            "head_dim), one seed:",
            "",
            "| stages | replaced layers | student, test | lost | which |",
            "|---|---|---|---|---|",
            *(
                f"| {text} | {done.chosen.replaced} of {model.depth} | {done.test_accuracy():.2%} "
                f"| {1 - done.test_accuracy() / done.test_accuracy('teacher'):.2%} | `{done.chosen.attention}` |"
                for text, done in one.mixes
            ),
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=list(TEACHERS))
    parser.add_argument("--to", metavar="SPEC", help="another attention for all layers")
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="of all stages together; a tenth of the teacher's if not given")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--work", type=Path, default=Path("runs/stages"), help="where models are kept")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data-root", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for one in found(options):
        write_atomically(options.out / f"stages-{options.data}.md", page(one))


if __name__ == "__main__":
    main()
