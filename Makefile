# make setup && make demo

BIN := .venv/bin

.PHONY: setup demo dist docs site test test-kills test-all test-lowest test-gpu lint bench clean

# Installs what it is given. uv, where there is one, takes about half of pip's time and chooses PyTorch's build for this
# machine (UV_TORCH_BACKEND=cpu for another one); where it cannot, for want of PyTorch's index, pip does it.
install = $(if $(shell command -v uv),uv pip install --quiet --compile-bytecode --python $(BIN)/python $(1) || )\
  $(BIN)/python -m pip install --quiet --disable-pip-version-check $(1)
export UV_TORCH_BACKEND ?= auto
DEV := -c constraints.txt -e '.[dev,peers,parquet]'

setup: .venv/.done

# Repeated only when pyproject.toml or constraints.txt changes. Torch must never be resolved without constraints.txt.
.venv/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || python3 -m venv .venv
	$(call install,-c constraints.txt -e .)
	touch $@

# What development and tests need in addition.
.venv/.done: .venv/.core
	$(call install,$(DEV))
	touch $@

demo: .venv/.core
	$(BIN)/linvit compare digits --image-size 28 --folds 5 --margin 2% --epochs 8 -a softmax -a performer-relu:m=16 \
	  --set trunk=32 --set dim=32 --set mlp_dim=64 --set batch_size=16 --out runs/demo

# Two workers share the cores: threads that wait must not spin.
test test-kills test-all: export OMP_WAIT_POLICY ?= passive

test: setup
	$(BIN)/python -m pytest -n 2 -m "not slow and not kills"

# Trainings, studies, searches and conversions that are killed and resumed, or run on a cluster.
test-kills: setup
	$(BIN)/python -m pytest -n 2 -m "kills and not slow"

test-all: setup
	$(BIN)/python -m pytest -n 2

# Another machine: the oldest versions admitted, on a processor without AVX-512.
LOWEST := .venv-lowest/bin

.venv-lowest/.done: pyproject.toml constraints-lowest.txt
	test -x $(LOWEST)/python || python3 -m venv .venv-lowest
	$(LOWEST)/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt -e '.[test,parquet,onnx]'
	touch $@

test-lowest: .venv-lowest/.done
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OMP_WAIT_POLICY=passive \
	  $(LOWEST)/python -m pytest -n 2 -m "not slow and not kills"

# On a machine with a CUDA device; the report is what to send back.
test-gpu: setup
	$(BIN)/python -m pytest -n 0 -m cuda tests/gpu/test_cuda.py; status=$$?; cat runs/gpu.json; exit $$status

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The sdist, and from it the wheel; the version is the tag's.
dist: setup
	rm -rf dist
	$(BIN)/python -m build

docs: setup
	$(BIN)/python docs/generate/write_reference.py

# The documentation site, in site/. Its tools have an environment of their own, so that `make setup` is no slower.
SITE := .venv-site/bin

.venv-site/.done: pyproject.toml
	test -x $(SITE)/python || python3 -m venv .venv-site
	$(SITE)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"][\
	  "optional-dependencies"]["site"])' | xargs $(SITE)/python -m pip install --quiet --disable-pip-version-check
	touch $@

site: .venv-site/.done
	$(SITE)/zensical build --clean --strict
	sed -i.bak 's#/report\.md"#/report/"#g' site/results/reports.html && rm site/results/reports.html.bak  # are pages here
	cd docs && find . -name '*.md' -not -path './results/*/*' | tar cf - -T - | tar xf - -C ../site  # llms.txt names them

bench: setup
	$(BIN)/python benchmarks/peers.py --out docs/benchmarks
	$(BIN)/python benchmarks/training.py --out docs/benchmarks
	$(BIN)/linvit bench error --out runs/bench
	$(BIN)/linvit bench speed --threads 2 --out runs/bench

clean:
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
