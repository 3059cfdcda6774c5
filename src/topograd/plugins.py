"""Registry entries of packages above those that use them.

A lower package never names an upper one, not even in a string. So the entries that upper packages add to its
registries are listed here, above them all. `topograd/__init__.py` holds the list, and Python runs that file
before any module of the package: the entries are there for every command, script, subprocess and rank. They
are addresses, and this module imports nothing, so that Ctrl-C is one line from a command's first moment.
"""

ENTRIES: dict[str, dict[str, str]] = {
    "optimizer": {  # checked by `runs/config.py`, which needs no torch; made by `training/optimizers.py`
        "muon+adamw": "topograd.training.optimizers:muon_and_adamw",
        "adamw": "topograd.training.optimizers:adamw",
        "sgd": "topograd.training.optimizers:sgd",
        "ddc-adam": "topograd.training.optimizers:ddc_adam",
        "ddc-muon": "topograd.training.optimizers:ddc_muon",
    },
    "model source": {
        "any": "topograd.convert.model_argument:resolve_model"
    },  # used by decode, runs, training
    "own text": {"sampled": "topograd.decode.sampled_text:sampled_text"},  # used by `training/forgetting.py`
    "search": {  # used by `training/runs.py`
        "soft": "topograd.search.soft:SoftTask",
        "surgery": "topograd.search.surgery:SurgeryTask",
    },
    "chat data": {  # used by `runs/session.py` and `training/forgetting.py`
        "jsonl": "topograd.specialists.records:prepare_chats",
    },
    "backward engine": {  # used by `training/step_runner.py`
        "scan": "topograd.interfaces.engines:Scan",
        "hybrid": "topograd.interfaces.engines:Hybrid",
    },
}
