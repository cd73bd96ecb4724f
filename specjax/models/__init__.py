"""Networks: pure functions of (config, params, inputs), and the files they come from."""
