# Everything a user or an engineer does with this tree. Each target installs what it needs.

# The profile of the programs that the soak and the benchmarks run. Tests and the demonstration run those of `dev`.
PROFILE := fast
TARGET_DIR := $(abspath $(or $(CARGO_TARGET_DIR),target))
PROGRAMS := $(TARGET_DIR)/$(PROFILE)
TEST_PROGRAMS := $(TARGET_DIR)/debug
SECONDS ?= 5
# How many faults the soak run has: 1000 take a quarter of an hour on two cores.
FAULTS ?= 1000
# Where man pages and completions are written.
MANUAL_DIR ?= $(TARGET_DIR)/manual
# Where the image and the chart are written.
IMAGE_DIR ?= $(TARGET_DIR)/image
# Where packages are written.
PACKAGE_DIR ?= $(TARGET_DIR)/packages

.PHONY: help demo test surroundings first-stage bench soak soak-vm few-regions lint deny fuzz vm setup build demo-setup demo-build test-build vm-image apiserver manual docs book image chart clean

help: ## prints this list of targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# Makes the target $(2), and the target $(1) beside it. The output of $(1) is shown if it fails.
beside = @mkdir -p $(TARGET_DIR); \
	nice $(MAKE) $(1) >$(TARGET_DIR)/$(1).log 2>&1 & beside=$$!; \
	$(MAKE) $(2); status=$$?; \
	echo "make: waiting for $(1); its log is $(TARGET_DIR)/$(1).log"; \
	wait $$beside || { status=1; cat $(TARGET_DIR)/$(1).log; }; \
	exit $$status

demo: demo-setup ## a replicated volume in a virtual machine that survives kills of its processes
	$(TEST_PROGRAMS)/shorthorn-demo

# The API server, the image of the virtual machines and mdbook wait for the network and for single processors.
# So they are made beside the first stage, which does not need them. A failure of either ends the run before the
# second stage.
test: setup ## every test: units, properties, processes, virtual machines
	$(call beside,surroundings,first-stage)
	$(TEST_PROGRAMS)/shorthorn-vm prepare
	SHORTHORN_BIN_DIR=$(TEST_PROGRAMS) tests/run second

surroundings: apiserver vm-image book

# The simulation of few-regions uses all processors for a fixed time. At the end of the stage, the surroundings have
# usually been made.
first-stage: ## the tests that need only processors: lint, documentation, units, models, simulation
	$(MAKE) lint test-build
	SHORTHORN_BIN_DIR=$(TEST_PROGRAMS) tests/run first
	$(MAKE) few-regions

bench: build apiserver ## speed, CPU and memory beside the ceilings of this machine
	$(PROGRAMS)/shorthorn-vm prepare
	$(PROGRAMS)/shorthorn-bench --seconds $(SECONDS)
	cargo bench --profile $(PROFILE) -p shorthorn-controller-core --bench placements
	cargo bench --profile $(PROFILE) -p shorthorn-controller --bench fleet

soak: build few-regions ## the simulation with new seeds, each for SECONDS, and FAULTS on real processes, as a table
	$(PROGRAMS)/shorthorn-sim --seed $$(date +%s) --seconds $(SECONDS) --jobs 0
	$(TARGET_DIR)/few-regions/debug/shorthorn-sim --seed $$(date +%s) --seconds $(SECONDS) --jobs 0
	$(PROGRAMS)/shorthorn-soak --faults $(FAULTS)

soak-vm: build ## FAULTS in a virtual machine with the newest kernel, on its ublk devices, as a table
	$(PROGRAMS)/shorthorn-vm prepare --kernel newest
	$(PROGRAMS)/shorthorn-soak --in-vm --frontend ublk --faults $(FAULTS)

# Volumes whose regions become larger when they are expanded: see REGIONS_MAX. The seeds are those of the commit.
# The flag needs a build of its own. The profile dev optimises the simulator and all crates under it.
few-regions: setup ## the simulation of volumes with few regions, for 20 seconds
	RUSTFLAGS="--cfg shorthorn_few_regions" CARGO_TARGET_DIR=$(TARGET_DIR)/few-regions \
		cargo run -p shorthorn-sim -- \
		--seed $$((0x$$(git rev-parse --short=12 HEAD))) --seconds 20 --jobs 0

# Links to private items are meant for readers of the source, as the comments of a crate are.
lint: setup ## format, clippy and documentation, with warnings denied
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" \
		cargo doc --workspace --no-deps --document-private-items --quiet

fuzz: setup ## each fuzz target for a minute: frames, TLS, certificates, NBD, files of a replica, CSI arguments
	tests/fuzz/run 60

deny: ## licences, duplicates, sources and advisories of the dependencies
	command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	cargo deny check bans licenses sources
	@if cargo deny fetch db; then cargo deny --offline check advisories; \
	else echo "make deny: the advisories are NOT checked: https://github.com/RustSec/advisory-db cannot be fetched" >&2; fi

vm: demo-setup ## a root shell in a virtual machine that has the programs installed
	$(TEST_PROGRAMS)/shorthorn-demo --shell

setup: ## installs the packages that the build and the tests need
	tests/setup

build: setup ## the programs
	cargo build --profile $(PROFILE) --workspace --bins

# What runs in the virtual machine of the demonstration, and the programs that start it.
# Benchmarks and soak are not built.
DEMO_PACKAGES := shorthorn-agent shorthorn-controller shorthornctl shorthorn-tests shorthorn-vmkit
DEMO_PROGRAMS := shorthorn-agent shorthorn-controller shorthornctl shorthorn-demo shorthorn-vm

demo-setup: setup
	$(call beside,vm-image,demo-build)
	$(TEST_PROGRAMS)/shorthorn-vm prepare --kernel ublk

demo-build: setup
	cargo build $(DEMO_PACKAGES:%=-p %) $(DEMO_PROGRAMS:%=--bin %)

test-build: setup
	cargo test --workspace --no-run

vm-image: setup ## the disk image of the virtual machines, once; `prepare` adds the machines that tests clone
	tests/vm/build-image >/dev/null

apiserver: setup ## the Kubernetes API server of the tests and benchmarks, once
	tests/apiserver/build >/dev/null

manual: build ## man pages and completions of shorthornctl, in MANUAL_DIR
	$(PROGRAMS)/shorthornctl man $(MANUAL_DIR)/man1
	mkdir -p $(MANUAL_DIR)/completions
	for shell in bash zsh fish; do \
		$(PROGRAMS)/shorthornctl completion $$shell >$(MANUAL_DIR)/completions/shorthornctl.$$shell || exit 1; \
	done

# The tests that compare the documentation with the code write it. A second run, as in `make test`, compares.
docs: setup ## the generated tables of docs, from the definitions in the code
	SHORTHORN_WRITE_DOCS=1 cargo test -p shorthorn-metrics -p shorthorn-controller -p shorthornctl -p shorthorn-agent -p shorthorn-tests \
		--lib --bins --test docs --test chart the_documentation_has

book: setup ## the documentation as a book in target/book; the first run builds mdbook
	tests/book $(TARGET_DIR)/book

image: setup ## the images with their lists of contents, in IMAGE_DIR; IMAGE=NAME:TAG, AGENT_IMAGE=NAME:TAG name them
	cargo build --profile release -p shorthorn-controller -p shorthornctl -p shorthorn-agent --bins
	packaging/image/build --programs $(TARGET_DIR)/release --output $(IMAGE_DIR)/shorthorn-controller.tar \
		$(if $(IMAGE),--name $(IMAGE))
	packaging/image/build --programs $(TARGET_DIR)/release --output $(IMAGE_DIR)/shorthorn-agent.tar \
		--image shorthorn-agent $(if $(AGENT_IMAGE),--name $(AGENT_IMAGE))

chart: setup ## the Helm chart as a file in IMAGE_DIR, and packaging/deploy rendered from it
	packaging/chart/render
	$$(packaging/chart/tools)/helm lint --strict packaging/chart
	$$(packaging/chart/tools)/helm package packaging/chart --destination $(IMAGE_DIR)

# Release programs, for hosts of users: built for long, once for each release.
.PHONY: packages
packages: setup ## .deb and .rpm of the agent, the controller and shorthornctl, in PACKAGE_DIR
	cargo build --release --bins -p shorthorn-agent -p shorthorn-controller -p shorthornctl
	packaging/build --programs $(TARGET_DIR)/release --output $(PACKAGE_DIR)
	@ls -1 $(PACKAGE_DIR)/*.deb $(PACKAGE_DIR)/*.rpm

clean: ## deletes the build outputs of this tree
	cargo clean
