# Every target is a short name for a script that can be read and run by itself.
.DEFAULT_GOAL := help
SHELL := bash
CACHE = $${MULLION_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/mullion}
CARGO = export CARGO_TARGET_DIR="$${CARGO_TARGET_DIR:-$(CACHE)/target}"; cargo

.PHONY: help test test-gpu lint fmt crds demo soak bench clean-lab

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: ## Everything: set-up, format, lints, licences, unit, property and end-to-end tests
	@tests/run

test-gpu: ## libvgpu.so on a real card: limits, launch overhead, share of the SMs (needs an NVIDIA GPU)
	@tests/gpu/run

lint: ## Format, clippy, licences, documents, generated files
	@tests/run setup fmt licences docs clippy generated

fmt: ## Format the code
	@cargo fmt --all

crds: ## Write crds/*.yaml anew from the Rust types
	@$(CARGO) run --quiet --locked -p mullion-crds --bin crdgen -- crds

demo: ## A cluster, Mullion and a GPU pod on this machine (KEEP=1 leaves it up)
	@KEEP=$(KEEP) tests/demo

soak: ## The end-to-end tests with all rounds of kill storms and outages, then two minutes of fuzzing per reader (hours)
	@MULLION_STORM_ROUNDS=20 MULLION_OUTAGE_SECONDS=120 tests/run setup parts e2e && fuzz/run 120

bench: ## The figures of docs/benchmarks.md
	@tests/bench/run

clean-lab: ## End a lab that was left up
	@. tests/env && tests/lab/lab down
