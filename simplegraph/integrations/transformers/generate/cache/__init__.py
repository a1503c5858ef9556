"""The cache of fixed addresses that decode graphs read and write. Runs no model."""
