"""Other people's models, unmodified. Each module here imports the library it is for."""
