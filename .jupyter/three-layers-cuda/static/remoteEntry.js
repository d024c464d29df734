// A JupyterLab extension written out by hand: no build, no dependencies. JupyterLab calls init() with
// the modules that it shares, then get() for the plugin, which teaches the editor a file ending.
(() => {
  let shared;

  async function load(name) {
    const [version] = Object.values(shared[name]);
    return (await version.get())();
  }

  async function plugin() {
    const { IEditorLanguageRegistry } = await load('@jupyterlab/codemirror');
    return {
      id: 'three-layers-cuda:plugin',
      autoStart: true,
      requires: [IEditorLanguageRegistry],
      activate: (app, languages) => {
        const cpp = languages.findByMIME('text/x-c++src');
        languages.addLanguage({
          name: 'CUDA',
          displayName: 'CUDA C++',
          mime: 'text/x-cuda',
          extensions: ['cu', 'cuh'],
          load: async () => cpp.support ?? (await languages.getLanguage(cpp)).support
        });
      }
    };
  }

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB['three-layers-cuda'] = {
    init: scope => {
      shared = scope;
    },
    get: async () => {
      const found = await plugin();
      return () => ({ __esModule: true, default: found });
    }
  };
})();
