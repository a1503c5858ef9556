"""The version of the package, which a build reads without importing anything else."""

VERSION = "0.2.0"
