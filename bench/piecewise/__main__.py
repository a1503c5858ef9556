"""``python -m bench.piecewise``: eager breaks and mixed batches; see `breaks`."""

from bench.piecewise.breaks import main

if __name__ == "__main__":
    main()
