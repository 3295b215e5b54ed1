"""What tests of conversions share."""

SHAPE = {"stem": "patch", "patch_size": 2, "dim": 24, "depth": 4, "heads": 2, "mlp_dim": 32}
SEARCHED = {"to": "performer-hyp", "data": "digits", "max_drop": 0.15, "steps": 60, "device": "cpu", "report": False}
