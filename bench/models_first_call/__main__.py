"""``python -m bench.models_first_call``: vision, diffusion and encoder models; see `first_call`."""

from bench.models_first_call.first_call import main

if __name__ == "__main__":
    main()
