# Targets for users and developers of a checkout. Needs Python 3.11+ and make; `make help` lists them.

PYTHON ?= python3
SCALE ?= 1
WORKERS ?= 2
ARGS ?=
SEEDS ?= 300
PROJECT ?= kipmesh
HOST_BROKERS ?= 127.0.0.1:19092,127.0.0.1:19093,127.0.0.1:19094
PROFILES ?= monitoring
COMPOSE ?=
TLS ?=
SANS ?=
CERTS := $(or $(KIPMESH_CERTS),build/certs)
SECURE := $(if $(TLS),--command-config $(CERTS)/client.properties)
DATA ?=
CLUSTERS ?= kipmesh
CLIENTS ?=
SUITES ?=
SERVICES := metadata_controller leader follower consumer single

VENV := .venv
PY := $(VENV)/bin/python
# Names the directory that the venv was created in: a checkout that moved creates its venv again.
STAMP := $(VENV)/installed
PYTEST := $(PY) -m pytest

ifneq ("$(shell cat $(STAMP) 2>/dev/null)","$(CURDIR)")
STALE := stale
endif
ifeq ("$(wildcard $(PY))","")
STALE := stale
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-slow check lint format types imports prose tidy unit e2e spark golden sim sim-replicas chaos bench \
  bench-catch-up bench-clients bench-spark bench-closest bench-failover bench-fencing bench-groups bench-metadata bench-sessions bench-spark-kills bench-snapshot bench-wakeup bench-compare clients client-suites fuzz-wire certs lock wheel \
  docs dashboards monitoring images image-next image-spark up down demo-compose chaos-compose docker kube clean distclean stale

help: ## list the targets
	@echo "make TARGET [PYTHON=python3.12] [SCALE=n] [SEEDS=n] [WORKERS=n] [ARGS='...']"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv with everything in it (other targets do this when it is missing or stale)

$(STAMP): pyproject.toml requirements.lock tools/install.sh $(STALE)
	@PYTHON="$(PYTHON)" sh tools/install.sh "$(VENV)"

demo: install ## the main job: a year of flights through a replicated cluster into Spark (SCALE=n: n times the data)
	$(PY) -m kipmesh_jobs.demo --scale $(SCALE) $(ARGS)

test: check ## lint, format, types, import contracts, prose, and the tests that are not slow
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "not slow" $(ARGS)

test-slow: install ## tests marked slow: simulator seeds, quorum faults, Spark jobs, wheel, containers
	$(PYTEST) -n $(WORKERS) --dist loadfile -m slow $(ARGS)

check: lint types imports prose ## lint, format, types, import contracts, prose

lint: install ## ruff: lint and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: install ## ruff: apply fixes and format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: install ## mypy, strict
	$(PY) -m mypy

imports: install ## import-linter: the layers and other contracts of pyproject.toml
	$(VENV)/bin/lint-imports

prose: install ## the lint for plain English (ARGS="docs/spark.md": other files)
	$(PY) tools/prose_lint.py $(ARGS)

tidy: install ## tests of the repository itself (sizes, links, rules, texts)
	$(PYTEST) tests/unit/repo $(ARGS)

unit: install ## unit tests
	$(PYTEST) -n $(WORKERS) tests/unit $(ARGS)

e2e: install ## tests with clusters of processes
	$(PYTEST) tests/e2e $(ARGS)

spark: install ## tests with Apache Spark (Java 17+)
	$(PYTEST) tests/spark $(ARGS)

clients: install ## third-party clients on a live cluster (CLUSTERS="kipmesh apache", CLIENTS="java kcat"; docs/clients.md)
	CLIENTS_LONG=1 CLUSTERS="$(CLUSTERS)" CLIENTS="$(CLIENTS)" $(PYTEST) tests/clients $(ARGS)

client-suites: install ## test suites of third-party clients (SUITES="franz-go kafka-tester", ARGS="--list"; docs/clients.md)
	$(PY) tools/client_suites.py $(SUITES) $(ARGS)

fuzz-wire: install ## send 200,000 mutated frames and half-open connections to the Kafka listener (ARGS="--frames 10000 --seed 7")
	$(PY) tools/fuzz_wire.py $(ARGS)

golden: install ## tests with Apache Kafka's own tools (Java 17+, Maven)
	$(PYTEST) tests/golden $(ARGS)

sim: install ## simulate the metadata quorum; resumes after the last seed (SEEDS=20000)
	$(PY) -m simulation.quorum --seeds $(SEEDS) --progress build/sim.json $(ARGS)

sim-replicas: install ## simulate the replication of partitions; resumes after the last seed (SEEDS=20000)
	$(PY) -m simulation.replicas --seeds $(SEEDS) --progress build/sim-replicas.json $(ARGS)

chaos: install ## inject faults into a local cluster and check its history (ARGS="deploy/chaos/random.yaml --duration 1800")
	$(PY) -m kipmesh.cli.main chaos run --dir build/chaos $(or $(ARGS),deploy/chaos/*.yaml)

bench: install ## throughput, latency, memory of a local cluster (ARGS="--quick", "--markdown", "--partitions 3000")
	$(PY) -m bench $(ARGS)

bench-spark: install ## records/s of a Spark batch read on local[2]
	$(PY) -m bench.spark $(ARGS)

bench-spark-kills: install ## kill a streaming query and brokers ten times while retention runs (ARGS="--kills 3", "--json")
	$(PY) -m bench.spark_kills $(ARGS)

bench-failover: install ## gaps when controllers and leaders fail (ARGS="--runs 10", "--kinds leader-kill kill", "--markdown")
	$(PY) -m bench.failover $(ARGS)

bench-closest: install ## bytes read across racks, with and without a selector (ARGS="--quick", "--modes off fetch", "--markdown")
	$(PY) -m bench.closest $(ARGS)

bench-catch-up: install ## a new broker loads 1,000,000 partitions by FetchSnapshot over loopback (ARGS="--quick", "--json")
	$(PY) -m bench.catch_up $(ARGS)

bench-clients: install ## our producers compared with aiokafka and kafka-python on Apache Kafka (ARGS="--quick", "--markdown")
	$(PY) -m bench.clients $(ARGS)

bench-compare: install ## ratios to Apache Kafka, measured in one run (ARGS="--quick", "--only produce,latency", "--chart F.svg")
	$(PY) -m bench.compare $(ARGS)

bench-fencing: install ## cost of one broker failure, by event and by partition; snapshots and compaction (ARGS="--quick", "--markdown")
	$(PY) -m bench.fencing $(ARGS)

bench-groups: install ## group members join, leave and die for ten minutes; the coordinator is killed (ARGS="--quick", "--markdown")
	$(PY) -m bench.groups $(ARGS)

bench-metadata: install ## metadata requests of a producer of 10,000 topics, compared with the Java producer (ARGS="--day": simulated)
	$(PY) -m bench.metadata $(ARGS)

bench-sessions: install ## cost of a fetch by the size of its session (ARGS="--quick", "--markdown", "--chart F.svg")
	$(PY) -m bench.sessions $(ARGS)

bench-snapshot: install ## a snapshot of 1,000,000 partitions (ARGS="--kafka": compared with Apache Kafka's own classes)
	$(PY) -m bench.snapshot $(ARGS)

bench-wakeup: install ## immediate high watermark updates to followers (392-02): fetches and delay, on and off (ARGS="--quick")
	$(PY) -m bench.wakeup $(ARGS)

docs: install ## generate protos/, docs/wire.md tables, docs/configuration.md, docs/raft.md diagrams and the tables of texts
	$(PY) tools/gen_protos.py
	$(PY) tools/gen_config_docs.py
	$(PY) tools/gen_raft_docs.py
	$(PY) tools/gen_wire_docs.py
	$(PY) tools/gen_texts.py

dashboards: install ## generate deploy/grafana/dashboards from tools/dashboards
	$(PY) -m tools.gen_dashboards

monitoring: install ## tests of the Prometheus rules and Grafana dashboards on a live cluster (needs Prometheus; docs/monitoring.md)
	$(PYTEST) tests/monitoring $(ARGS)

kube: install ## tests of the Helm chart on the Kubernetes of KUBECONFIG (needs helm, kubectl, KIPMESH_KUBE_IMAGE; docs/operations.md)
	$(PYTEST) tests/kube $(ARGS)

lock: install ## write the newest versions within the bounds of pyproject.toml to requirements.lock
	$(PY) -m pip install --quiet --upgrade uv
	$(PY) -m uv pip compile pyproject.toml --extra demo --extra kubernetes --extra containers --group dev --universal --python-version 3.11 --upgrade \
	  --no-annotate --custom-compile-command "make lock" --quiet --output-file requirements.lock

images: install ## build the images kipmesh/SERVICE:VERSION (BASE_IMAGE=..., IMAGE_PREFIX=..., IMAGE_TAG=...; docs/docker.md)
	@sh tools/images.sh $(VENV) $(SERVICES)

image-next: install ## build kipmesh/leader:next, a version with other messages, for `make kube` (KIPMESH_KUBE_IMAGE_NEXT)
	@sh tools/image_wheels.sh $(VENV) service
	@$(PY) tools/next_build.py build/next
	@cd build/next && IMAGE_TAG=$(or $(IMAGE_TAG),next) sh tools/images.sh $(CURDIR)/$(VENV) leader

image-spark: install ## build the image of the Spark jobs, kipmesh/spark:VERSION
	@sh tools/images.sh $(VENV) spark

up: images $(if $(TLS),certs) ## start a cluster of containers with Prometheus and Grafana, and wait until it is healthy (PROFILES= for the cluster alone, TLS=1; docs/docker.md)
	@COMPOSE="$(COMPOSE)" PROFILES="$(PROFILES)" TLS="$(TLS)" sh tools/compose.sh up $(PROJECT)

down: ## stop the cluster of `make up`; DATA=remove removes its volumes
	@COMPOSE="$(COMPOSE)" PROFILES="$(PROFILES)" sh tools/compose.sh down $(PROJECT) $(DATA)

demo-compose: up ## run the flights demo through the cluster of `make up`
	@$(PY) -m kipmesh.cli.main $(SECURE) topic delete flights --if-exists --bootstrap $(HOST_BROKERS)
	$(PY) -m kipmesh.cli.main $(SECURE) job flights --fill --bootstrap $(HOST_BROKERS) --out build/demo-compose $(ARGS)

chaos-compose: install ## inject faults into the cluster of `make up` and check its history (ARGS="deploy/chaos/compose/faults.yaml")
	$(PY) -m kipmesh.cli.main $(SECURE) chaos run --dir build/chaos --compose $(PROJECT) $(or $(ARGS),deploy/chaos/compose/*.yaml)

certs: install ## create certificates for docker-compose in build/certs or KIPMESH_CERTS; valid ones are kept (SANS="mesh.example.org")
	@$(PY) -m kipmesh.cli.main certs make $(CERTS) --node --keep $(addprefix --san ,$(SANS)) \
	  controller-1 controller-2 controller-3 leader-1 follower-1 follower-2
	@$(PY) -m kipmesh.cli.main certs make $(CERTS) --keep $(addprefix --san ,$(SANS)) consumer-1 prometheus client
	@printf 'security.protocol=SSL\nssl.certificate.dir=%s\n' "$(abspath $(CERTS))/client" >$(CERTS)/client.properties

docker: install ## tests of the images and of docker-compose.yml (needs a Docker daemon)
	KIPMESH_DOCKER_TESTS=full $(PYTEST) tests/docker $(ARGS)

wheel: install ## build dist/*.whl
	$(PY) -m build --wheel --no-isolation --outdir dist

clean: ## remove build output and caches (.venv stays)
	rm -rf build dist spark-warehouse metastore_db derby.log
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find kipmesh kipmesh_chaos kipmesh_jobs simulation services tests tools bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	rm -rf $(VENV)
