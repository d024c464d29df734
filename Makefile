# make lab        open the course in JupyterLab
# make test       run the tests, on the GPU too where there is one
# make bench      measure every figure that the project quotes
# make notebooks  run the notebooks and keep their outputs (on a GPU: they are what is committed)
#
# Each sets up .venv from requirements.txt first (about 6 GB; a few minutes). To use an environment
# that is there already, and install nothing:   make PYTHON=python3 VENV= test

PYTHON = python3
VENV = .venv
NOTEBOOK = notebooks/00_your_machine.ipynb
TESTS =

ifeq ($(strip $(VENV)),)
RUN = $(PYTHON)
READY =
else
RUN = $(VENV)/bin/python
READY = $(VENV)/ready
endif

.PHONY: lab test bench notebooks
.DELETE_ON_ERROR:

lab: $(READY)
	$(RUN) -m jupyterlab --notebook-dir=. $(NOTEBOOK)

test: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m pytest -ra -n auto --dist worksteal $(TESTS)

bench: $(READY)
	$(RUN) tests/bench_loader.py
	$(RUN) -m lab.collect

notebooks: $(READY)
	$(RUN) -m lab.notebooks

# What is missing is said before anything is downloaded.
$(VENV)/ready: requirements.txt $(wildcard .jupyter/*/*.json .jupyter/*/*/*.js)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python lacks venv. Install it: apt-get install python3-venv"; exit 1; }
	@command -v g++ >/dev/null || \
	  { echo "There is no C++ compiler. Install one: apt-get install g++"; exit 1; }
	@$(PYTHON) -c 'import sysconfig, os, sys; \
	  sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	  { echo "Python's headers are missing. Install them: apt-get install python3-dev"; exit 1; }
	@test -d $(VENV) || $(PYTHON) -c 'import shutil, sys; \
	  sys.exit(shutil.disk_usage(".").free < 9e9)' || \
	  { echo "Less than 9 GB are free here; PyTorch and CUDA need 6, and 3 while they install."; exit 1; }
	@echo "Setting up $(VENV): PyTorch, the CUDA compiler, JupyterLab. That takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet -r requirements.txt
	mkdir -p $(VENV)/share/jupyter/labextensions
	cp -r .jupyter/three-layers-cuda $(VENV)/share/jupyter/labextensions/
	touch $@
