"""The lab as a learner sees it: in JupyterLab, in a browser, with mouse and keyboard.

Pictures of what was seen are kept in $SCREENSHOTS, if that is set.
"""

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path

import nbformat
import pytest
import torch

from tests.conftest import ROOT

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs apt-get install chromium chromium-driver"
)
PATIENCE = 600  # seconds: the CPU machine is compiled on the way
SETTINGS = {  # every cell is in the page, also when it is out of sight; no bracket is added to ours
    "notebook-extension/tracker": '{"windowingMode": "none", "codeCellConfig": '
    '{"autoClosingBrackets": false}}',
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a JupyterLab whose folder looks like this project, and that folder."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("loader.py", "lab", "ops", "kernels", "bindings", "simt"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")  # the tracked ones stay untouched
    settings = tmp_path_factory.mktemp("settings")
    for name, text in SETTINGS.items():
        file = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    log = folder / "jupyter.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0",
             "--IdentityProvider.token=test", f"--ServerApp.root_dir={folder}"],
            stdout=output, stderr=subprocess.STDOUT, cwd=folder,
            env={**os.environ, "JUPYTERLAB_SETTINGS_DIR": str(settings)},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"http://(localhost|127\.0\.0\.1):\d+/", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        urllib.request.urlopen(f"{found[0]}api?token=test", timeout=60).read()
        yield found[0], folder
    finally:
        process.terminate()
        process.wait(30)


class Page:
    """One notebook, open in a browser."""

    def __init__(self, driver, url: str):
        self.driver = driver
        driver.get(url)
        self.until(lambda: self.cells())
        self.until(self.has_kernel)

    def has_kernel(self) -> bool:
        for button in self.find(".jp-Dialog .jp-mod-accept"):  # "Select Kernel"
            button.click()
        return self.is_idle()

    def find(self, css: str) -> list:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def cells(self) -> list:
        return self.find(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook .jp-Cell")

    def until(self, condition):
        return WebDriverWait(self.driver, PATIENCE, 0.2).until(lambda _: condition())

    def menu(self, *labels: str) -> None:
        """Click through the menu bar: ``menu("Run", "Run All Cells")``."""
        for label in labels:
            path = f"//*[contains(@class,'lm-Menu') and contains(@class,'itemLabel')][.='{label}']"
            item = self.until(
                lambda path=path: [e for e in self.driver.find_elements(By.XPATH, path)
                                   if e.is_displayed()]
            )[0]  # fmt: skip
            item.click()

    def output(self, cell: int) -> str:
        return "\n".join(e.text for e in self.cells()[cell].find_elements(
            By.CSS_SELECTOR, ".jp-OutputArea-output"))  # fmt: skip

    def prompt(self, cell: int) -> str:
        found = self.cells()[cell].find_elements(By.CSS_SELECTOR, ".jp-InputPrompt")
        return found[0].text if found else ""

    def is_idle(self) -> bool:
        return any("| Idle" in item.text for item in self.find("#jp-main-statusbar"))

    def wait_for_run(self) -> None:
        """Until no cell waits and the kernel has had nothing to do for two seconds."""

        def done() -> bool:
            for _ in range(10):
                waiting = any("*" in self.prompt(i) for i in range(len(self.cells())))
                if waiting or not self.is_idle():
                    return False
                time.sleep(0.2)
            return True

        self.until(done)

    def edit(self, cell: int, line: int, erase: int, text: str) -> None:
        """With the keyboard: go to the end of a line (from 0), erase characters, type."""
        editor = self.cells()[cell].find_element(By.CSS_SELECTOR, ".cm-content")
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", editor)
        editor.click()
        keys = webdriver.ActionChains(self.driver)
        keys.key_down(Keys.CONTROL).send_keys(Keys.HOME).key_up(Keys.CONTROL)
        keys.send_keys(Keys.DOWN * line, Keys.END, Keys.BACKSPACE * erase, text).perform()

    def shot(self, name: str, cell: int | None = None) -> None:
        if folder := os.environ.get("SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            if cell is not None:
                self.driver.execute_script(
                    "arguments[0].scrollIntoView({block: 'start'})", self.cells()[cell]
                )
                time.sleep(0.5)
            self.driver.save_screenshot(f"{folder}/{name}.png")


@pytest.fixture
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage",
                     "--window-size=1300,1600"):  # fmt: skip
        options.add_argument(argument)
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def write(folder: Path, name: str, *cells: str) -> None:
    """A notebook that is ready to run."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, folder / "notebooks" / name)


def test_edit_recompile_check_and_fail_in_a_browser(server, browser):
    url, folder = server
    source = (ROOT / "kernels/vector_add/1_naive.cu").read_text()
    cell = f"%%kernel vector_add/mine\n{source}// {uuid.uuid4()}"  # never compiled before
    write(
        folder, "small.ipynb",
        "import sys; sys.path.insert(0, '..')\nimport lab\n%load_ext lab",
        cell,
        "lab.check('vector_add', 'mine')",
        "lab.bench('vector_add', ['mine'])",
        "lab.diff('vector_add', '1_naive', 'mine')",
    )  # fmt: skip
    lines = cell.splitlines()
    block = next(i for i, line in enumerate(lines) if line.startswith("constexpr int BLOCK = "))
    adds = next(i for i, line in enumerate(lines) if "a[i] + b[i];" in line)
    page = Page(browser, f"{url}lab/tree/notebooks/small.ipynb?token=test&reset")

    page.menu("Run", "Run All Cells")
    page.wait_for_run()
    page.shot("1_ran")
    assert re.search(r"vector_add/mine: .*(mine.cu)", page.output(1))
    assert "vector_add/mine passed" in page.output(2)
    if torch.cuda.is_available():
        pictures = page.cells()[3].find_elements(By.TAG_NAME, "img")
        assert "GB/s" in page.output(3) and "Bars of GB/s" in pictures[0].get_attribute("alt")
    else:
        assert "counts and never times" in page.output(3)

    page.edit(1, block, 4, "64;")  # another block size: still right
    page.menu("Run", "Run All Cells")
    page.wait_for_run()
    page.shot("2_edited", 1)
    assert "vector_add/mine passed" in page.output(2)
    assert "compiled mine.cu" in page.output(1)
    assert "+ constexpr int BLOCK = 64;" in page.output(4)

    page.edit(1, adds, 1, "")  # no semicolon
    page.menu("Run", "Run All Cells")
    page.wait_for_run()
    page.shot("3_compile_error", 1)
    assert re.search(rf"%%kernel vector_add/mine, line ({adds + 1}|{adds + 2}): ", page.output(1))
    assert "Help: A semicolon is missing" in page.output(1)
    assert "Traceback" not in page.output(1)
    assert page.prompt(2) == "[ ]:"  # Run All stopped at the error

    page.edit(1, adds, 0, " + b[i];")  # compiles, and is wrong
    page.menu("Run", "Run All Cells")
    page.wait_for_run()
    page.shot("4_wrong", 2)
    assert "vector_add/mine is wrong for float32" in page.output(2)
    (picture,) = page.cells()[2].find_elements(By.TAG_NAME, "img")
    assert "elements are wrong" in picture.get_attribute("alt")
    assert picture.size["width"] > 100


def test_the_first_notebook_runs_from_the_menu(server, browser):
    url, folder = server
    name = "01_vector_add.ipynb"
    notebook = nbformat.read(folder / "notebooks" / name, 4)
    page = Page(browser, f"{url}lab/tree/notebooks/{name}?token=test&reset")
    page.menu("Run", "Run All Cells")
    page.wait_for_run()
    for i in range(0, len(notebook.cells), 4):
        page.shot(f"01_{i:02}", i)
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            assert re.match(r"\[\d+\]", page.prompt(i)), f"cell {i} did not run: {page.output(i)}"
