# Everything a user or an engineer does with this tree. Each target installs what it needs.

# The profile of the programs that virtual machines, the demonstration and the benchmarks run.
PROFILE := fast
TARGET_DIR := $(abspath $(or $(CARGO_TARGET_DIR),target))
export SHORTHORN_BIN_DIR := $(TARGET_DIR)/$(PROFILE)
SECONDS ?= 5
# How many faults the soak run has: 1000 take a quarter of an hour on two cores.
FAULTS ?= 1000
# Where man pages and completions are written.
MANUAL_DIR ?= $(TARGET_DIR)/manual

.PHONY: help demo test bench soak soak-vm few-regions lint deny vm setup build images manual clean

help: ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: build images ## a replicated volume as a block device in a virtual machine, surviving kills
	$(SHORTHORN_BIN_DIR)/shorthorn-demo

test: setup lint few-regions build images ## every test: units, properties, processes, virtual machines
	tests/run

bench: build images ## speed, CPU and memory beside the ceilings of this machine
	$(SHORTHORN_BIN_DIR)/shorthorn-bench --seconds $(SECONDS)
	cargo bench --profile $(PROFILE) -p shorthorn-controller-core --bench placements
	cargo bench --profile $(PROFILE) -p shorthorn-controller --bench fleet

soak: build few-regions ## the simulation with new seeds, each for SECONDS, and FAULTS on real processes, as a table
	$(SHORTHORN_BIN_DIR)/shorthorn-sim --seed $$(date +%s) --seconds $(SECONDS) --jobs 0
	$(TARGET_DIR)/few-regions/$(PROFILE)/shorthorn-sim --seed $$(date +%s) --seconds $(SECONDS) --jobs 0
	$(SHORTHORN_BIN_DIR)/shorthorn-soak --faults $(FAULTS)

soak-vm: build images ## FAULTS in a virtual machine with the newest kernel, on its ublk devices, as a table
	$(SHORTHORN_BIN_DIR)/shorthorn-soak --in-vm --frontend ublk --faults $(FAULTS)

# Volumes whose regions become larger when they are expanded: see REGIONS_MAX. The seeds are those of the commit.
few-regions: setup ## the simulation of volumes with few regions, for 20 seconds
	RUSTFLAGS="--cfg shorthorn_few_regions" CARGO_TARGET_DIR=$(TARGET_DIR)/few-regions \
		cargo run --profile $(PROFILE) -p shorthorn-sim -- \
		--seed $$((0x$$(git rev-parse --short=12 HEAD))) --seconds 20 --jobs 0

lint: setup ## format, and clippy with warnings denied
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

deny: ## licences, duplicates and sources of the dependencies
	command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	cargo deny check bans licenses sources

vm: build images ## a root shell in a virtual machine that has the programs installed
	$(SHORTHORN_BIN_DIR)/shorthorn-demo --shell

setup: ## the packages that building and testing need
	tests/setup

build: setup ## the programs
	cargo build --profile $(PROFILE) --workspace --bins

images: build ## the virtual machine images and the Kubernetes API server of the tests, once
	$(SHORTHORN_BIN_DIR)/shorthorn-vm prepare
	tests/apiserver/build >/dev/null

manual: build ## man pages and completions of shorthornctl, in MANUAL_DIR
	$(SHORTHORN_BIN_DIR)/shorthornctl man $(MANUAL_DIR)/man1
	mkdir -p $(MANUAL_DIR)/completions
	for shell in bash zsh fish; do \
		$(SHORTHORN_BIN_DIR)/shorthornctl completion $$shell >$(MANUAL_DIR)/completions/shorthornctl.$$shell || exit 1; \
	done

clean: ## what was built here
	cargo clean
