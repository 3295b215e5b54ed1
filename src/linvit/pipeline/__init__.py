"""From a request to experiments: the steps that train, compare, tune and convert share.

configure.py  what --config adds to a request      plan.py     what fits a time budget
prepare.py    data, starts and variants, each once  design.py   experiments from layers of defaults
"""
