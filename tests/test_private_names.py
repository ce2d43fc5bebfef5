"""Private torch names live in one file, and what is overridden of torch in another; these are the whole lists."""

import ast
import inspect
from pathlib import Path

from torch.distributed.pipelining import PipelineStage

from slipstream.pipeline.watched_stage import WatchedStage

SOURCE = Path(__file__).parent.parent / "src" / "slipstream"
HOME = SOURCE / "torch_private.py"
WRAPPER = SOURCE / "pipeline" / "watched_stage.py"

# What `torch_private.py` uses. A new torch that renames one breaks here first.
PRIVATE = {
    "_backward_hooks",
    "_get_default_store",
    "_PipelineStage",
    "_PipelineStageBase",
    "_Replicate",
    "_StridedShard",
    "_foreach_add_",
    "_foreach_copy_",
    "_foreach_lerp_",
    "_foreach_mul_",
    "_foreach_norm",
    "_foreach_zero_",
    "_fsdp_param_group",
    "_fsdp_param_groups",
    "_get_fsdp_state",
    "_global_optimizer_post_hooks",
    "_global_optimizer_pre_hooks",
    "_is_profiler_enabled",
    "_opt_called",
    "_optimizer_step_post_hooks",
    "_optimizer_step_pre_hooks",
    "_post_accumulate_grad_hooks",
    "_register_backend",
    "_set_default_backend",
    "_world",
    "torch.utils._pytree",
}

# What `watched_stage.py` overrides, with the parameters torch calls it by. Not private by name, nor public.
OVERRIDDEN = {
    "forward_one_chunk": ["fwd_chunk_id"],  # and others, handed on as they are
    "backward_one_chunk": ["bwd_chunk_id", "loss", "full_backward", "last_backward"],
    "backward_weight_one_chunk": ["bwd_chunk_id", "last_backward"],
    "_get_init_p2p_neighbors_ops": [],  # gone from some torches
}


def private_names(path: Path) -> set[str]:
    """Private attributes of torch's modules and objects, and private imports from torch, in one file.

    An object's own privates (`self._x`, a name the file itself defines) are not torch's.
    """
    tree = ast.parse(path.read_text())
    torch_modules = {"torch", "dist"}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            if any(part.startswith("_") for part in (node.module or "").split(".")):
                found.add(node.module or "")
            found |= {alias.name for alias in node.names if alias.name.startswith("_")}
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in torch_modules | {
                "optimizer",
                "stage",
                "group",
                "fsdp_module",
                "fsdp_state",
                "parameter",
            }:
                found.add(node.attr)
    return found


def test_the_list_is_complete():
    assert private_names(HOME) == PRIVATE


def test_no_other_file_uses_a_private_torch_name():
    offenders = {
        str(path.relative_to(SOURCE)): sorted(names)
        for path in SOURCE.rglob("*.py")
        if path != HOME and (names := private_names(path))
    }
    assert not offenders


def test_the_stage_wrapper_overrides_what_is_listed():
    own = {n for n, of in vars(WatchedStage).items() if inspect.isfunction(of) and hasattr(PipelineStage, n)}
    assert own - {"__init__"} | {"_get_init_p2p_neighbors_ops"} == set(OVERRIDDEN)
    for name, parameters in OVERRIDDEN.items():
        if parameters:
            theirs = list(inspect.signature(getattr(PipelineStage, name)).parameters)[1:]
            assert theirs[: len(parameters)] == parameters, name
            assert name.startswith("forward") or theirs == parameters, name


def test_no_other_file_touches_what_a_stage_overrides():
    """Two patches on one stage undo each other, or depend on their order."""
    for path in SOURCE.rglob("*.py"):
        named = {
            node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
        }
        assert path == WRAPPER or not named & OVERRIDDEN.keys(), path


def test_nothing_is_put_onto_an_object_of_torch_but_by_the_files_for_it():
    """`stage.x = ...`, `schedule.x = ...` where the object is torch's."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            patched = [
                target.attr
                for target in targets
                if isinstance(target, ast.Attribute)
                and hasattr(PipelineStage, target.attr)
                and inspect.isfunction(getattr(PipelineStage, target.attr))
            ]
            assert not patched, (path, patched)
