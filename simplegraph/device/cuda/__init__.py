"""The device protocol on `torch.cuda.CUDAGraph`, and the driver calls beside it. No policy lives here."""
