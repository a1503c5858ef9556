"""What a call and an agreement of ranks cost the host; no model, and nothing that keeps a device busy."""
