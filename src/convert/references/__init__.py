"""Reference models: for each supported model the upstream JAX model and the upstream PyTorch model, as plain functions.

protocol.py defines `Reference`, which a factory returns for a plan; the `reference` key of a rule file names the factory. One
folder per family has the factories. They share plan_facts.py (what a plan knows), loading.py (how a PyTorch module is built and
fed), module_facts.py (what a live module is configured to compute) and variants.py (functions that are known to be confused, for
the diagnosis). published/ has the facts that each writer's models were published with. user_reference.py validates a reference of the user, and the values that its functions return. May import `planning` and what lies below it. Upstream packages are imported inside functions.
"""
