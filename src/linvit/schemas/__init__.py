"""Everything that linvit stores, as pydantic models without torch: what writes a document also reads it.

    model.py       ModelConfig: what rebuilds a model            recipe.py       Recipe: how a model is trained
    experiment.py  Experiment: one training, fully described     study.py        Study: variants × seeds (study.json)
    search.py      Search, Space, Best: a tuning run             conversion.py   Conversion: teacher → student

What needs PyTorch to be checked, such as whether an attention fits a model, is checked where models are built.
"""
