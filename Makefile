# Everything on a fresh Debian with Python 3.11:
#   make demo    four hospitals train one model, as processes of their own over mutual TLS
#   make test    all checks and tests, as CI runs them
#   make bench   the benchmarks
#   make soak    faults by the thousand, of which the tests draw a sample: half an hour of them, others each day;
#                MINUTES=0 for all
#   make fuzz    gives each decoder any bytes, led by atheris; FUZZ=-runs=5000000 for longer
#   make mutants removes each security check in turn: a test must miss it; plants faults: a seed must find each
#   make matrix  the fast tests on other releases of torch and Python, before an issue is closed; see
#                docs/versions.md. TORCH="2.15.0" for one; FOLDER=... for environments elsewhere
#   make site    the pages as a site, in build/site
#   make lock    what fedtrain is tested with, by digest, and its bill of materials
#   make bundle  build/bundle: every wheel by digest, for machines without a network
#   make advisories   known faults of what is locked, from a database that pip-audit fetches
#   make release SIGN=~/.ssh/id_ed25519 BASE=python:3.11-slim@sha256:...
#                     dist/: the wheel, the notes, the bill of materials, the image's base; their digests, signed
# Both first make what they need (.venv); a second time that takes no time.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
TOOLS := $(VENV)/tools

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of processes start in the tests, and would compile our modules each for itself.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test soak fuzz bench mutants matrix site lock bundle advisories release check clean
.DEFAULT_GOAL := test

demo: $(INSTALLED)
	$(BIN)/python examples/heart/demo.py

test: $(INSTALLED) $(TOOLS) check
	$(BIN)/pytest -n 3 -m "not slow"
	$(BIN)/pytest -n 3 --maxschedchunk 1 -m slow

MINUTES ?= 28
soak: $(INSTALLED) $(TOOLS)
	SOAK_MINUTES=$(MINUTES) $(BIN)/pytest -n 2 --maxschedchunk 1 -m soak

FUZZ ?= -max_total_time=30
fuzz: $(INSTALLED)
	$(BIN)/python -m pip install --quiet atheris
	$(BIN)/python -m tests.fuzz $(FUZZ)

# The figures of docs/performance.md; leave the machine alone meanwhile.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/deployed_round.py
	$(BIN)/python benchmarks/asynchronous.py
	$(BIN)/python benchmarks/simulate.py
	$(BIN)/python benchmarks/secagg.py
	$(BIN)/python benchmarks/guarded_round.py
	$(BIN)/python benchmarks/gossip.py
	$(BIN)/python benchmarks/datacenter.py
	$(BIN)/python benchmarks/compression.py
	$(BIN)/python benchmarks/footprint.py
	$(BIN)/python benchmarks/privacy.py
	$(BIN)/python benchmarks/robustness.py --seeds 1 --hostile 3
	$(BIN)/python benchmarks/learning.py --small

mutants: $(INSTALLED)
	$(BIN)/python -m tests.security.mutants
	$(BIN)/python -m tests.vsim.mutants

FOLDER ?= build/matrix
matrix:
	$(PYTHON) tests/matrix.py --folder $(FOLDER) $(TORCH)

site: $(INSTALLED)
	$(BIN)/python -m mkdocs build

lock: $(INSTALLED)
	$(BIN)/python deployment/lock.py

bundle: $(INSTALLED)
	$(BIN)/python deployment/bundle.py

advisories: $(INSTALLED)
	$(BIN)/python -m pip install --quiet pip-audit
	sed 's/+[a-z0-9.]*//' deployment/torch.lock deployment/requirements.lock | \
	  $(BIN)/pip-audit --strict --no-deps --disable-pip --requirement /dev/stdin

# hatchling puts no time of its own into a wheel: whoever builds this commit has the same bytes.
release: $(INSTALLED)
	@echo '$(BASE)' | grep -Eq '^[^ ]+@sha256:[0-9a-f]{64}$$' || { echo 'make release: BASE must name the base image' \
	  'by the digest that you have looked at, as python:3.11-slim@sha256:..., for a tag may be another image tomorrow' >&2; exit 1; }
	rm -rf dist && $(BIN)/python -m hatchling build -t wheel -d dist
	cp CHANGELOG.md dist/NOTES.md && cp deployment/sbom.cdx.json deployment/*.lock dist/
	echo 'docker build -f deployment/Dockerfile --build-arg PYTHON=$(BASE) -t fedtrain .' >dist/IMAGE
	cd dist && sha256sum * >SHA256SUMS && ssh-keygen -Y sign -f $(SIGN) -n fedtrain SHA256SUMS

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# torch first and by itself: 2.13.0 is the CPU build where one is provided; a plain `torch` would draw gigabytes of CUDA.
$(INSTALLED): pyproject.toml
	@"$(PYTHON)" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer with its venv module is needed (found: $$("$(PYTHON)" --version 2>&1))." >&2; \
	  echo "On Debian: apt-get install python3 python3-venv; or name another one: make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# What tests use and pip doesn't have. Where it can't be installed, those tests say so and are skipped.
# nginx is unpacked into .venv and not installed: its package would start it, and at each boot again.
NGINX := nginx libnginx-mod-stream
$(TOOLS): $(INSTALLED)
	@if ! { [ -e /usr/sbin/nginx ] && [ -e /usr/lib/nginx/modules/ngx_stream_module.so ]; }; then \
	  mkdir -p $(VENV)/nginx && cd $(VENV)/nginx && \
	  { apt-get download -q $(NGINX) || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get download -q $(NGINX); } && \
	    printf '%s\n' *.deb | xargs -I{} dpkg-deb -x {} . && usr/sbin/nginx -v; } >apt.log 2>&1 || \
	  { rm -rf usr; echo "nginx can't be fetched by apt-get ($(VENV)/nginx/apt.log); its test will be skipped."; }; \
	fi
	@missing=; \
	command -v docker-compose >/dev/null || missing="$$missing docker-compose"; \
	command -v systemd-analyze >/dev/null || missing="$$missing systemd"; \
	command -v openssl >/dev/null || missing="$$missing openssl"; \
	command -v strace >/dev/null || missing="$$missing strace"; \
	command -v chromium >/dev/null || missing="$$missing chromium"; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "apt-get install$$missing"; \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; } \
	    >$(VENV)/apt.log 2>&1 || { echo "That failed ($(VENV)/apt.log); the tests of$$missing will be skipped."; exit 0; }; \
	elif [ -n "$$missing" ]; then \
	  echo "Not here, so that their tests will be skipped:$$missing"; \
	fi; \
	touch $@

clean:
	rm -rf $(VENV) examples/*/runs examples/heart/site-data
