"""Private torch names live in one file, and this is the whole list of them."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "slipstream"
HOME = SOURCE / "torch_private.py"

# What `torch_private.py` uses. A new torch that renames one breaks here first.
PRIVATE = {
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
    "_fsdp_param_group",
    "_fsdp_param_groups",
    "_get_fsdp_state",
    "_get_init_p2p_neighbors_ops",
    "_global_optimizer_post_hooks",
    "_global_optimizer_pre_hooks",
    "_opt_called",
    "_optimizer_step_post_hooks",
    "_optimizer_step_pre_hooks",
    "_register_backend",
    "_set_default_backend",
    "torch.utils._pytree",
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
