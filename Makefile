# Each target does all its own set-up: a fresh machine needs Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
READY  := $(VENV)/.ready
LATEST := .venv-latest
LOWEST := .venv-lowest
# Some libraries' newest versions need a newer Python than ours does.
NEWEST_PYTHON = for one in python3.15 python3.14 python3.13 python3.12 $(PYTHON); do $$one -c "" 2>/dev/null && { command -v $$one; break; }; done
FAISS  := $(if $(shell command -v nvidia-smi 2>/dev/null),gpu,cpu)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
UV     := $(shell command -v uv 2>/dev/null)
SERVERS := python3-gi gir1.2-gst-rtsp-server-1.0 gstreamer1.0-plugins-base gstreamer1.0-plugins-good gstreamer1.0-plugins-ugly nats-server
IMAGES       ?= receiver learner
BUILD_FLAGS  ?=
DEMO_SECONDS ?= 120
DEMO_OUT     ?= demo-out
GATES        ?=
TESTS        ?=
EXPERIMENT   ?= duel
PRESET       ?= cpu-small
DATA         ?= cifar:data/cifar10
OPTIONS      ?=
SOAK_MINUTES ?= 60

# Container images often set it. Each process of a target would then compile all of torch again,
# which takes longer than the import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test latest lowest mutations browser check chaos bench reproduce study gpu servers servers-packages site prometheus containers manifests lint format docs setup clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-17s %s\n", $$1, $$2}' Makefile

setup: $(READY)  ## install everything into .venv

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stream-ssl needs Python 3.11 or newer; choose one with: make PYTHON=python3.12")'
	@echo "Installing into $(VENV), once: 3.3 GB to download, 6.1 GB on disk. UV_TORCH_BACKEND=cpu leaves CUDA out: 0.5 and 1.6 GB (docs/install.md)"
ifneq ($(UV),)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) $(VENV)
	$(UV) pip install --python $(VENV)/bin/python -c constraints.txt -e '.[learner,$(FAISS),dev]'
else
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[learner,$(FAISS),dev]'
endif
	@touch $@

demo: $(READY)  ## run the whole system on embedded real images, and write a report
	$(VENV)/bin/stream-ssl demo --seconds $(DEMO_SECONDS) --out $(DEMO_OUT)

test: $(READY)  ## run all tests
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto --dist worksteal

latest:  ## run all tests with the newest version of each dependency, in an environment of its own
	@echo "Installing the newest versions into $(LATEST), with the newest Python that is here"
	rm -rf $(LATEST)
ifneq ($(UV),)
	$(UV) venv --quiet --python "$$($(NEWEST_PYTHON))" $(LATEST)
	$(UV) pip install --quiet --upgrade --python $(LATEST)/bin/python -e '.[learner,$(FAISS),dev]'
else
	"$$($(NEWEST_PYTHON))" -m venv $(LATEST)
	$(LATEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e '.[learner,$(FAISS),dev]'
endif
	OMP_NUM_THREADS=1 $(LATEST)/bin/python -m pytest -n auto --dist worksteal $(TESTS)

lowest:  ## run all tests with the lowest version of each dependency, in an environment of its own
	@echo "Installing the lowest versions into $(LOWEST)"
	rm -rf $(LOWEST)
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) tests/lowest.py >$(LOWEST)/constraints.txt
ifneq ($(UV),)
	$(UV) pip install --quiet --python $(LOWEST)/bin/python -c $(LOWEST)/constraints.txt -e '.[learner,$(FAISS),dev]'
else
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LOWEST)/constraints.txt -e '.[learner,$(FAISS),dev]'
endif
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n auto --dist worksteal $(TESTS)

mutations: $(READY)  ## break the code in many places; the tests must notice each
	OMP_NUM_THREADS=1 $(VENV)/bin/python tests/mutations.py

browser: $(READY)  ## test the page in a real Chromium behind a real nginx, which must be installed
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { echo "make browser needs Chromium: apt-get install chromium"; exit 1; }
	@command -v nginx >/dev/null || test -x /usr/sbin/nginx || { echo "make browser needs nginx: apt-get install nginx-light"; exit 1; }
ifneq ($(UV),)
	$(UV) pip install --quiet --python $(VENV)/bin/python -c constraints.txt -e '.[browser]'
else
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
endif
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -m browser tests/browser

lint: $(READY)  ## check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(READY)  ## format the code
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

check: lint test  ## run lint and test, which must pass before a commit

chaos: $(READY)  ## run kills, power cuts, bad disks, hostile clients and an hour's soak: GATES, SOAK_MINUTES
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests:$(CURDIR)/tests/app:$(CURDIR)/tests/daemon:$(CURDIR)/tests/receiver:$(CURDIR)/tests/journal:$(CURDIR)/tests/feed:$(CURDIR)/tests/learning OMP_NUM_THREADS=1 $(VENV)/bin/python -m chaos $(GATES) --soak_minutes $(SOAK_MINUTES)

bench: $(READY)  ## measure speed and memory, and write a dated report
	$(VENV)/bin/python -m benchmarks

reproduce: $(READY)  ## run an experiment of the papers: EXPERIMENT, PRESET, DATA, OPTIONS
	$(VENV)/bin/python -m benchmarks.experiments $(EXPERIMENT) --preset $(PRESET) --data $(DATA) $(OPTIONS)

study: $(READY)  ## run the study, which compares memories on streams: DATA, OPTIONS
	$(VENV)/bin/python -m benchmarks.experiments study --data $(DATA) $(OPTIONS)

gpu: $(READY)  ## run the tests and benchmarks that need a CUDA GPU
	@$(VENV)/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "make gpu needs a CUDA GPU, and torch sees none here")'
	$(VENV)/bin/python -m pytest -m gpu
	$(VENV)/bin/python -m benchmarks gpu

servers-packages:  ## list the Debian packages that `make servers` needs
	@echo $(SERVERS)

servers: $(READY)  ## test cameras and brokers against real servers, which must be installed
	@/usr/bin/python3 -c 'import gi; gi.require_version("GstRtspServer", "1.0")' 2>/dev/null && command -v nats-server >/dev/null || { echo "make servers needs: apt-get install $(SERVERS)"; exit 1; }
	$(VENV)/bin/python -m pytest -m servers

prometheus: $(READY)  ## test alerts and dashboards with a real Prometheus, which must be installed
	@command -v promtool >/dev/null && command -v prometheus >/dev/null || { echo "make prometheus needs promtool and prometheus: apt install prometheus"; exit 1; }
	$(VENV)/bin/python -m pytest tests/observe/test_observe_deploy.py tests/observe/test_observe_recordings.py tests/observe/test_observe_prometheus.py

containers: $(READY)  ## build the container images with buildah, and test them with podman
	@command -v buildah >/dev/null && command -v podman >/dev/null || { echo "make containers needs: apt-get install buildah podman"; exit 1; }
	for role in $(IMAGES); do buildah build --format docker --layers $(BUILD_FLAGS) --target $$role -t stream-ssl-$$role:$(VERSION) -f deploy/containers/Containerfile . || exit 1; done
	buildah images --filter reference=stream-ssl-*
	$(VENV)/bin/python -m pytest -m containers tests/deploy

manifests: $(READY)  ## check compose, Kubernetes and Containerfile by schemas and linters
ifneq ($(UV),)
	$(UV) pip install --quiet --python $(VENV)/bin/python -c constraints.txt -e '.[manifests]'
else
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[manifests]'
endif
	$(VENV)/bin/python -m pytest -m manifests tests/deploy

docs: $(READY)  ## regenerate the pages that are made from code
	$(VENV)/bin/python -m stream_ssl.config.help > stream_ssl/config/learner_help.txt
	$(VENV)/bin/python -m stream_ssl.observe.catalogue_page > docs/metrics.md
	$(VENV)/bin/python -m stream_ssl.observe.alert_rules > deploy/prometheus/alerts.yml
	$(VENV)/bin/python deploy/grafana/dashboard.py > deploy/grafana/stream-ssl.json
	$(VENV)/bin/python deploy/grafana/dashboard.py fleet > deploy/grafana/fleet.json
	{ printf '# From deploy/prometheus/alerts.yml, by `make docs`.\napiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata: {name: stream-ssl}\nspec:\n'; grep -v '^#' deploy/prometheus/alerts.yml | sed 's/^\(.\)/  \1/'; } > deploy/kubernetes/components/monitoring/prometheus-rule.yaml

site: $(READY)  ## build the documentation site in site/; a broken link fails
ifneq ($(UV),)
	$(UV) pip install --quiet --python $(VENV)/bin/python -c constraints.txt -e '.[docs]'
else
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
endif
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	@echo "Read it: $(VENV)/bin/python -m http.server -b 127.0.0.1 -d site 8000, at http://127.0.0.1:8000"

clean:  ## delete environments, caches and build results
	rm -rf $(VENV) $(LATEST) $(LOWEST) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
